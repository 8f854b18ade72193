// Products of rows and weights in bfloat16 on the tile unit (AMX).
//
// A tile holds 16 outputs by 32 inputs of the weights, as they lie; another holds the same 32 inputs of up to 16 rows, in
// pairs of numbers. So rows are turned once (`TurnRows`), and weights never. A sum runs over the pairs in their order and
// knows no other row: a row has the same bits for any number of rows. One row goes the same way as many.
//
// The process must have asked for tiles (`native._grants_tiles`), or the first of them ends it. A test defines HSD_TILES
// and the intrinsics itself.

#pragma once

#if defined(__AMX_BF16__) && !defined(HSD_TILES)
#define HSD_TILES 1
#endif

#if defined(HSD_TILES)

#include "vectors.h"

constexpr int kTile = 16;      // outputs of a tile, rows of a tile, pairs of a step
constexpr int kTileStep = 32;  // inputs of a step

static inline int64_t StepsOf(int64_t k) { return k / kTileStep; }

// Turns 16 x 16 words.
static inline void Turn(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Where the group that row b begins stands among turned rows of width k. A group of c rows is [k / 32, 16 pairs, c] words.
static inline int64_t GroupAt(int64_t b, int64_t k) { return b * StepsOf(k) * kTile; }

// Turns inputs [first, last), whole steps, of rows [from, to) of x [n, k]; `from` begins a group.
static void TurnRows(const uint16_t* x, int64_t n, int64_t k, int64_t from, int64_t to, int64_t first, int64_t last,
                     uint32_t* turned) {
  for (int64_t g = from; g < to; g += kTile) {
    const int count = int(std::min<int64_t>(kTile, n - g));
    for (int64_t s = first / kTileStep; s < last / kTileStep; s++) {
      uint32_t* out = turned + GroupAt(g, k) + s * kTile * count;
      const uint16_t* from_row = x + g * k + s * kTileStep;
      __m512i r[16];
      for (int b = 0; b < 16; b++) r[b] = b < count ? _mm512_loadu_si512(from_row + b * k) : _mm512_setzero_si512();
      Turn(r);
      for (int p = 0; p < kTile; p++) _mm512_mask_storeu_epi32(out + p * count, (1u << count) - 1, r[p]);
    }
  }
}

// The shapes of tiles 0, 1 (sums), 2 (weights), 3, 4 (rows of two groups).
class Tiles {
 public:
  ~Tiles() { _tile_release(); }
  void Shape(int outputs, int rows, int more_rows) {
    if (outputs == outputs_ && rows == rows_ && more_rows == more_rows_) return;
    outputs_ = outputs, rows_ = rows, more_rows_ = more_rows;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, unused[14] = {};
      uint16_t bytes[16] = {};
      uint8_t height[16] = {};
    } shapes;
    static_assert(sizeof(shapes) == 64);
    auto set = [&](int tile, int height, int width) { shapes.height[tile] = height, shapes.bytes[tile] = 4 * width; };
    set(0, outputs, rows), set(1, outputs, more_rows), set(2, outputs, kTile), set(3, kTile, rows), set(4, kTile, more_rows);
    // GCC 12 is told that 8 bytes of the shapes are read, and nothing of what fills a tile: it might leave out stores.
    asm volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
  }

 private:
  int outputs_ = 0, rows_ = 0, more_rows_ = 0;
};

// The sums of one tile of outputs, `apart` from one another, and one or two groups of rows: sums[group][output][row].
template <int kGroups>
static inline void TileSums(const uint16_t* w, int64_t apart, int64_t k, const uint32_t* rows, int count,
                            const uint32_t* more, int more_count, float* sums) {
  _tile_zero(0);
  if (kGroups == 2) _tile_zero(1);
  const int64_t stride = 2 * apart * k;
  for (int64_t s = 0; s < StepsOf(k); s++) {
    const uint16_t* at = w + s * kTileStep;
#pragma GCC unroll 16
    for (int a = 0; a < kTile; a++)
      __builtin_prefetch(reinterpret_cast<const char*>(at) + a * stride + kAhead / kTile * 2, 0, 2);
    _tile_loadd(2, at, stride);
    _tile_loadd(3, rows + s * kTile * count, 4 * count);
    _tile_dpbf16ps(0, 2, 3);
    if (kGroups == 2) {
      _tile_loadd(4, more + s * kTile * more_count, 4 * more_count);
      _tile_dpbf16ps(1, 2, 4);
    }
  }
  _tile_stored(0, sums, 4 * kTile);
  if (kGroups == 2) _tile_stored(1, sums + kTile * kTile, 4 * kTile);
}

// y[b, a] = x[b] . w[a] for n rows and outputs a of [first, last). `turned` has the rows as `TurnRows` leaves them.
static void TileOutputs(const uint16_t* x, const uint32_t* turned, const uint16_t* w, float* y, int64_t n, int64_t k,
                        int64_t stride, int64_t first, int64_t last) {
  alignas(64) float sums[2 * kTile * kTile];
  Tiles tiles;
  auto run = [&](int64_t a, int64_t apart, int outputs) {
    for (int64_t g = 0; g < n; g += 2 * kTile) {
      const int count = int(std::min<int64_t>(kTile, n - g)), more = int(std::min<int64_t>(kTile, n - g - count));
      tiles.Shape(outputs, count, std::max(more, 1));
      const uint32_t *rows = turned + GroupAt(g, k), *others = turned + GroupAt(g + count, k);
      if (more > 0)
        TileSums<2>(w + a * k, apart, k, rows, count, others, more, sums);
      else
        TileSums<1>(w + a * k, apart, k, rows, count, rows, count, sums);
      for (int b = 0; b < count + more; b++) {
        const float* from = sums + b / kTile * kTile * kTile + b % kTile;
        float* to = y + (g + b) * stride + a;
        for (int i = 0; i < outputs; i++) to[i * apart] = from[i * kTile];
      }
    }
  };
  // Each output of a tile is the next of a stream of its own, as in `Tile`.
  const int64_t apart = (last - first) / kTile;
  for (int64_t a = first; a < first + apart; a++) run(a, apart, kTile);
  if (first + apart * kTile < last) run(first + apart * kTile, 1, int(last - first - apart * kTile));
  for (int64_t j = StepsOf(k) * kTileStep; j < k; j++)
    for (int64_t b = 0; b < n; b++)
      for (int64_t a = first; a < last; a++) {
        float& sum = y[b * stride + a];
        sum = MulAdd(Scalar(w[a * k + j]), Scalar(x[b * k + j]), sum);
      }
}

#endif
