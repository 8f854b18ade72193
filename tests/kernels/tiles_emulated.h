// The tile instructions in plain C++, for `hsd_jax/kernels/cpu/amx.h` on machines that lack them: one thread's tiles.
//
// A product of pairs of bfloat16 is as Intel's manual has it (TDPBF16PS): of the pairs of an output and a row the even
// products are added in their order to one sum and the odd ones to another, each product fused with its sum; both start
// at zero, and their sum is added to the tile. Denormal numbers are zero.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release

namespace emulated {

struct Tile {
  int height = 0, bytes = 0;
  uint8_t row[16][64] = {};
};
static thread_local Tile tiles[8];
static thread_local bool is_configured = false;

static void Check(bool fine) {
  if (!fine) abort();
}
static float Flushed(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits &= bits & 0x7f800000u ? 0xffffffffu : 0x80000000u;
  std::memcpy(&x, &bits, 4);
  return x;
}
static float Number(const uint8_t* at) {
  uint32_t bits = uint32_t(at[0]) << 16 | uint32_t(at[1]) << 24;
  float x;
  std::memcpy(&x, &bits, 4);
  return Flushed(x);
}

static void LoadConfig(const void* config) {
  const uint8_t* from = static_cast<const uint8_t*>(config);
  Check(from[0] == 1 && from[1] == 0);
  for (int i = 2; i < 16; i++) Check(from[i] == 0);
  for (int t = 0; t < 16; t++) {
    uint16_t bytes;
    std::memcpy(&bytes, from + 16 + 2 * t, 2);
    Check(bytes <= (t < 8 ? 64 : 0) && from[48 + t] <= 16 && (bytes == 0) == (from[48 + t] == 0));
    if (t >= 8) continue;
    tiles[t] = {};
    tiles[t].bytes = bytes, tiles[t].height = from[48 + t];
  }
  is_configured = true;
}
static Tile& At(int t) {
  Check(is_configured && tiles[t].height > 0 && tiles[t].bytes > 0);
  return tiles[t];
}
static void Load(int t, const void* base, int64_t stride) {
  Tile& tile = At(t);
  Check(tile.height == 1 || stride >= tile.bytes);  // rows that overlap: the shape is that of a larger group
  std::memset(tile.row, 0, sizeof(tile.row));
  for (int i = 0; i < tile.height; i++)
    std::memcpy(tile.row[i], static_cast<const char*>(base) + i * stride, tile.bytes);
}
static void Store(int t, void* base, int64_t stride) {
  for (int i = 0; i < At(t).height; i++)
    std::memcpy(static_cast<char*>(base) + i * stride, tiles[t].row[i], tiles[t].bytes);
}
static void Zero(int t) { std::memset(At(t).row, 0, sizeof(tiles[t].row)); }
static void Multiply(int sums, int a, int b) {
  Tile &c = At(sums), &w = At(a), &x = At(b);
  Check(w.height == c.height && x.bytes == c.bytes && x.height * 4 == w.bytes);
  for (int m = 0; m < c.height; m++) {
    float even[16] = {}, odd[16] = {}, sum[16];
    for (int p = 0; p < x.height; p++) {
      const float first = Number(w.row[m] + 4 * p), second = Number(w.row[m] + 4 * p + 2);
      for (int n = 0; n < 16; n++) {
        even[n] = Flushed(std::fma(first, Number(x.row[p] + 4 * n), even[n]));
        odd[n] = Flushed(std::fma(second, Number(x.row[p] + 4 * n + 2), odd[n]));
      }
    }
    std::memcpy(sum, c.row[m], 64);
    for (int n = 0; n < 16; n++) sum[n] = Flushed(Flushed(sum[n]) + Flushed(even[n] + odd[n]));
    std::memcpy(c.row[m], sum, c.bytes);
  }
}
static void Release() { is_configured = false; }

}  // namespace emulated

#define HSD_TILES 1
#define _tile_loadconfig(config) emulated::LoadConfig(config)
#define _tile_loadd(tile, base, stride) emulated::Load(tile, base, stride)
#define _tile_stored(tile, base, stride) emulated::Store(tile, base, stride)
#define _tile_zero(tile) emulated::Zero(tile)
#define _tile_dpbf16ps(sums, a, b) emulated::Multiply(sums, a, b)
#define _tile_release() emulated::Release()

// Products of pairs of bfloat16 and rounding to it, where AVX-512 has neither. A rounded number is one of the intrinsics'
// types.
#if defined(__AVX512F__) && !defined(__AVX512BF16__)
#define __AVX512BF16__ 1

namespace emulated {

static inline __m512i Halves(__m512 x) {  // to nearest even; denormal numbers are zero
  __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 tiny = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_and_epi32(rounded, tiny, bits, _mm512_set1_epi32(0x80000000));
  return _mm512_srli_epi32(_mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000)), 16);
}
static inline __m256bh Rounded(__m512 x) { return (__m256bh)_mm512_cvtepi32_epi16(Halves(x)); }
static inline __m512bh RoundedTwo(__m512 second, __m512 first) {
  __m512i low = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(Halves(first)));
  return (__m512bh)_mm512_inserti64x4(low, _mm512_cvtepi32_epi16(Halves(second)), 1);
}
static inline __m128i RoundedOne(__m128 x) {
  return _mm256_castsi256_si128(_mm512_cvtepi32_epi16(Halves(_mm512_castps128_ps512(x))));
}
static inline __m512 Pairs(__m512 sum, __m512bh a, __m512bh b) {
  auto low = [](__m512bh x) { return _mm512_castsi512_ps(_mm512_slli_epi32((__m512i)x, 16)); };
  auto high = [](__m512bh x) { return _mm512_castsi512_ps(_mm512_and_si512((__m512i)x, _mm512_set1_epi32(0xffff0000))); };
  return _mm512_fmadd_ps(low(a), low(b), _mm512_fmadd_ps(high(a), high(b), sum));
}

}  // namespace emulated

#define _mm_cvtneps_pbh(x) emulated::RoundedOne(x)
#define _mm512_cvtneps_pbh(x) emulated::Rounded(x)
#define _mm512_cvtne2ps_pbh(second, first) emulated::RoundedTwo(second, first)
#define _mm512_dpbf16_ps(sum, a, b) emulated::Pairs(sum, a, b)
#endif
