//! Lines of the 8-bit cache, compiled for AVX-VNNI.

lines_of_bytes!("avx2,fma,avxvnni");
