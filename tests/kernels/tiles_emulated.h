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
static float Flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? 0.0f : x; }
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
  for (int m = 0; m < c.height; m++)
    for (int n = 0; n < c.bytes / 4; n++) {
      float even = 0, odd = 0, sum;
      for (int p = 0; p < x.height; p++) {
        even = Flushed(std::fma(Number(w.row[m] + 4 * p), Number(x.row[p] + 4 * n), even));
        odd = Flushed(std::fma(Number(w.row[m] + 4 * p + 2), Number(x.row[p] + 4 * n + 2), odd));
      }
      std::memcpy(&sum, c.row[m] + 4 * n, 4);
      sum = Flushed(Flushed(sum) + Flushed(even + odd));
      std::memcpy(c.row[m] + 4 * n, &sum, 4);
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
