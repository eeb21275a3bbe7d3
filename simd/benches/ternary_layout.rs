//! Which layout of ternary, 4-bit and bf16 rows lets a gemv read at the memory's speed?
//!
//! Every variant of a comparison runs the same AVX2 inner loop over the same weights, in another order, far
//! more of them than the caches hold; `crate` is the kernel as shipped. `read` only loads the bytes: the
//! bound of the same run. Machines differ by 20 % from one minute to the next, so compare within a run.
//!
//! `cargo bench -p samara-benches --bench ternary_layout`

#[cfg(target_arch = "x86_64")]
mod layout;

#[cfg(target_arch = "x86_64")]
fn main() {
    if !std::arch::is_x86_feature_detected!("avx2") {
        println!("skipped: the comparison needs AVX2");
        return;
    }
    let mut criterion = criterion::Criterion::default().configure_from_args();
    layout::ternary::compare(&mut criterion);
    layout::affine4::compare(&mut criterion);
    layout::bf16::compare(&mut criterion);
    criterion.final_summary();
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {
    println!("skipped: the comparison needs AVX2");
}
