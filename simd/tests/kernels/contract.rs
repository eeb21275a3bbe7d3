//! What the constructors and the table refuse, and what dispatch says about itself.

use std::panic::catch_unwind;

use samara_simd::{
    Affine4Rows, Bf16Rows, Error, Isa, KV_PART, Kernels, Kv, KvSlice, Op, Q8_MAX_DIM, QuantizedRow,
    QuantizedRows, TernaryRows, attention_state_len,
};

#[test]
fn wrong_lengths_are_refused() {
    let scalar = Kernels::scalar;
    let act = || QuantizedRow::new(&[0; 128], &[0.0; 8], &[0.0; 3]);
    let ternary = || TernaryRows::from_part(&[0x55; 384], 5, 128);
    let refused: [(&str, fn()); 12] = [
        ("ternary codes", || _ = TernaryRows::new(&[0; 127], &[0; 8], 4, 128)),
        ("ternary scales", || _ = TernaryRows::new(&[0; 128], &[0; 6], 4, 128)),
        ("ternary part", || _ = TernaryRows::from_part(&[0; 128], 4, 128)),
        ("ternary overflow", || _ = TernaryRows::new(&[0; 128], &[0; 8], usize::MAX, usize::MAX)),
        ("4-bit columns", || _ = Affine4Rows::new(&[0; 256], 4, 65)),
        ("4-bit length", || _ = Affine4Rows::new(&[0; 128], 4, 64)),
        ("bf16 length", || _ = Bf16Rows::new(&[0; 128], 4, 17)),
        ("activations", || _ = QuantizedRow::new(&[0; 64], &[0.0; 4], &[0.0; 1])),
        ("activation scales", || _ = QuantizedRow::new(&[0; 128], &[0.0; 4], &[0.0; 3])),
        ("activation offsets", || _ = QuantizedRow::new(&[0; 128], &[0.0; 8], &[0.0; 2])),
        ("rope", || Kernels::scalar().rope(&mut [0.0; 3], &[0.0; 2], &[0.0; 2])),
        ("router", || Kernels::scalar().top_k_router(&mut [0.0; 2], true, &mut [0; 3], &mut [0.0; 3])),
    ];
    for (name, call) in refused {
        assert!(catch_unwind(call).is_err(), "{name}");
    }
    for (range, len) in [(1..4, 3), (0..3, 3), (4..8, 4), (0..4, 3)] {
        let call = || scalar().ternary_gemv(&ternary(), &act(), range.clone(), &mut vec![0.0; len]);
        assert!(catch_unwind(call).is_err(), "{range:?} into {len}");
    }
    for (rows, weights) in [(&[1][..], &[1.0][..]), (&[0], &[]), (&[0], &[1.0, 1.0])] {
        let call = || scalar().combine(&[0.0; 5], rows, weights, &mut [0.0; 3]);
        assert!(catch_unwind(call).is_err(), "{rows:?} with {weights:?}");
    }
    let wide = || QuantizedRow::new(&[0; 256], &[0.0; 8], &[0.0; 5]);
    assert!(catch_unwind(|| scalar().ternary_gemv(&ternary(), &wide(), 0..5, &mut [0.0; 5])).is_err());
    let rows = || QuantizedRows::new(&[0; 256], &[0.0; 16], &[0.0; 6], 2, 128);
    for (tokens, range, len) in [(&[2][..], 0..5, 5), (&[0, 1], 0..5, 5), (&[0], 1..4, 3)] {
        let call = || scalar().ternary_gemm(&ternary(), &rows(), tokens, range.clone(), &mut vec![0.0; len]);
        assert!(catch_unwind(call).is_err(), "{tokens:?} {range:?} into {len}");
    }
    for (n_keys, dim, first) in [(17, 1, 0), (1, 17, 0), (1, 0, 0), (1, 1, 1), (KV_PART + 1, 1, 0)] {
        let call = || {
            let slice =
                KvSlice { kv: Kv::F32 { keys: &[0.0; 16], values: &[0.0; 16] }, n_keys, head_dim: dim };
            let mut state = vec![0.0; attention_state_len(1, dim)];
            scalar().attention_part(&vec![0.0; dim], &slice, first, 1.0, &mut [0.0; KV_PART], &mut state);
        };
        assert!(catch_unwind(call).is_err(), "{n_keys} keys of {dim} from {first}");
    }
    // Keys, their scales, and values, one too few.
    for (k, s, v, dim) in
        [(15, 16, 256, 1), (16, 15, 256, 1), (16, 16, 255, 1), (272, 16, 256 * 17, Q8_MAX_DIM + 1)]
    {
        let (k, s, v) = (vec![0; 16 * k], vec![0.0; s], vec![0; 16 * v]);
        let kv = Kv::Q8 { keys: &k, key_scales: &s, values: &v, value_scales: &s };
        let call = || {
            let slice = KvSlice { kv, n_keys: 1, head_dim: dim };
            let mut state = vec![0.0; attention_state_len(1, dim)];
            scalar().attention_part(&vec![0.0; dim], &slice, 0, 1.0, &mut [0.0; KV_PART], &mut state);
        };
        assert!(catch_unwind(call).is_err(), "{} bytes of {dim}", k.len());
    }
}

#[test]
fn the_fastest_present_instruction_set_is_detected() {
    let fastest = Isa::ALL.into_iter().rfind(|&isa| Kernels::for_isa(isa).is_ok());
    assert_eq!(Some(Kernels::detect().isa()), fastest);
    assert_eq!(Kernels::for_isa(Isa::Scalar).map(|kernels| kernels.isa()), Ok(Isa::Scalar));
    #[cfg(target_arch = "x86_64")]
    assert_eq!(Kernels::for_isa(Isa::Avx2).is_ok(), std::arch::is_x86_feature_detected!("avx2"));
    #[cfg(not(target_arch = "x86_64"))]
    assert_eq!(Kernels::for_isa(Isa::Avx2).err(), Some(Error::IsaUnavailable { isa: Isa::Avx2 }));
}

#[test]
fn every_kernel_of_a_table_names_its_instruction_set() {
    for isa in Isa::ALL {
        let Ok(kernels) = Kernels::for_isa(isa) else { continue };
        let ids = kernels.ids().map(|id| id.to_string());
        assert_eq!(ids, Op::ALL.map(|op| format!("{op}/{isa}")));
        assert_eq!(ids[0], format!("ternary_gemv/{isa}"));
    }
}

#[test]
fn names_of_instruction_sets() {
    for isa in Isa::ALL {
        assert_eq!(isa.to_string().parse(), Ok(isa));
    }
    let unknown = "AVX2".parse::<Isa>();
    assert_eq!(unknown, Err(Error::UnknownIsa { name: "AVX2".to_owned() }));
    assert!(Error::IsaUnavailable { isa: Isa::Avx2 }.to_string().contains("avx2"));
}
