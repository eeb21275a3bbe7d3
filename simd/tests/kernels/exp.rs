//! The exponential against that of f64. Its source is compiled here: the crate has no tests of its own, so that its kernels, which take
//! long to compile, are not compiled for them a second time.

#[path = "../../src/arch/generic/exp.rs"]
mod generic;

use generic::exp;

#[test]
fn exp_is_within_two_units() {
    for i in -870_000..=880_000 {
        let x = i as f32 / 10_000.0;
        let error = f64::from(exp(x)) / f64::from(x).exp() - 1.0;
        assert!(error.abs() <= 2.0 * f64::from(f32::EPSILON), "exp({x}) is off by {error:e}");
    }
}

#[test]
fn exp_at_its_ends() {
    let inf = f32::INFINITY;
    for (x, expected) in [(0.0, 1.0), (-0.0, 1.0), (-88.0, 0.0), (-inf, 0.0), (89.0, inf), (inf, inf)] {
        assert_eq!(exp(x), expected, "exp({x})");
    }
    assert!(exp(f32::NAN).is_nan());
}
