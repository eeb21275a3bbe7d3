//! Lines of the 8-bit cache, compiled for AVX2.

lines_of_words!("avx2,fma");
