// A kernel's one ternary matrix, `w` of ROWS rows, times the quantised row in workgroup memory. A workgroup has PANELS panels of 4 rows,
// from `first_panel` on.

// use gemv

// Panels of a workgroup, at most 64: an invocation for each row.
override PANELS: u32 = 1u;
override GEMV_PANELS: u32 = PANELS;
override MATRIX_PANELS: u32 = (ROWS + 3u) / 4u;

var<private> first_panel: u32;

fn panel_at(v: u32) -> u32 {
    let panel = first_panel + v;
    return select(NO_PANEL, panel * COL_BLOCKS * 32u, panel < MATRIX_PANELS);
}

fn codes_at(at: u32) -> u32 {
    return w[at];
}

// The word that has the scale of a row: half `row % 2` of it.
fn scale_word(row: u32) -> u32 {
    return w[MATRIX_PANELS * COL_BLOCKS * 32u + row / 2u];
}
