//! Refuses targets that the format is not for: a file is mapped and its numbers are used in place.
//!
//! A build script says so early: it depends on nothing and runs on the host.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of_target = |name: &str| std::env::var(format!("CARGO_CFG_TARGET_{name}")).unwrap_or_default();
    let (target, endian, width) =
        (std::env::var("TARGET").unwrap_or_default(), of_target("ENDIAN"), of_target("POINTER_WIDTH"));
    if endian != "little" || width != "64" {
        println!(
            "cargo::error=Samara maps model files in place and needs a little-endian 64-bit target; {target} is \
             {endian}-endian with {width}-bit pointers"
        );
    }
}
