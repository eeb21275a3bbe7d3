//! Lines of the 8-bit cache, compiled for AVX-512.

lines_of_words!("avx512f,avx512bw,avx512dq,avx512vl");
