//! Lines of the 8-bit cache, compiled for AVX-512 VNNI.

lines_of_bytes!("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni");
