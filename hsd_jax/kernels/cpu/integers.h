// Products of rows and weights that are both whole numbers in 8 bits.
//
// A row is rounded once, in blocks of kBlockSize numbers with a scale each: the largest number of a block becomes 127 or
// -127. The sums of a block are exact, whatever instructions add them up. They are then added in float32, block by block,
// each times its scale, and at last comes the scale of the output. So a result has the same bits at every instruction
// set, and for any number of rows.
//
// Weights lie in groups of kGroup outputs: kStep inputs of every output of a group stand side by side, in one line of the
// cache, and behind them the next kStep inputs. So a lane sums one output alone. With outputs one behind another the
// sums of a block would have to become floats for each 64 products instead of each 1,024, and that took twice as long.

#pragma once

#include <limits>

#include "vectors.h"

constexpr int64_t kBlockSize = 64;
constexpr int kGroup = 16, kStep = 4, kSteps = kBlockSize / kStep, kLine = kGroup * kStep;

static inline int64_t BlocksOf(int64_t k) { return (k + kBlockSize - 1) / kBlockSize; }

static inline Int AllInts(int32_t x) { return x - Int{}; }

// Rows of `blocks` whole blocks: numbers, and the scale and start of each block. The start is what a sum must begin with
// where weights are raised by 128 for instructions that take them unsigned: -128 times the sum of the block's numbers.
struct RoundedRows {
  const int8_t* numbers;
  const float* scales;
  const int32_t* starts;
  int64_t blocks;
  RoundedRows From(int64_t row) const {
    return {numbers + row * blocks * kBlockSize, scales + row * blocks, starts + row * blocks, blocks};
  }
};

// Below this a block counts as zeros: 127 over its largest number might be infinite.
constexpr float kLeast = 1e-30f;

// Rounds a block of `count` numbers, with zeros behind them, to the nearest, a tie to the even one. A block that holds NaN
// or infinity gets a scale of NaN.
static inline void RoundBlock(const float* x, int64_t count, int8_t* numbers, float* scale, int32_t* start) {
  float filled[kBlockSize];
  if (count < kBlockSize) {
    std::memcpy(filled, x, count * sizeof(float));
    std::memset(filled + count, 0, (kBlockSize - count) * sizeof(float));
    x = filled;
  }
  Int most = {};  // as integers, magnitudes of floats have the same order, and NaN is above infinity
  for (int64_t i = 0; i < kBlockSize; i += kLanes) {
    Int size = (Int)Load(x + i) & 0x7fffffff, above = size > most;
    most = (size & above) | (most & ~above);
  }
  int32_t largest = 0;
  for (int i = 0; i < kLanes; i++) largest = std::max<int32_t>(largest, most[i]);
  float range;
  std::memcpy(&range, &largest, sizeof(range));
  bool is_finite = range < std::numeric_limits<float>::infinity();
  float inverse = range < kLeast || !is_finite ? 0.0f : 127.0f / range;
  // A number this large has no bits below 1, so that the sum is rounded there: its low byte is the whole number.
  const Vec whole = All(12582912.0f), times = All(inverse);
  int32_t words[kBlockSize];
  for (int64_t i = 0; i < kBlockSize; i += kLanes) {
    Int word = (Int)MulAdd(Load(x + i), times, whole);
    std::memcpy(words + i, &word, sizeof(word));
  }
  int32_t sum = 0;
  for (int64_t i = 0; i < kBlockSize; i++) {
    numbers[i] = static_cast<int8_t>(words[i]);
    sum += numbers[i];
  }
  *start = -128 * sum;
  *scale = !is_finite ? std::numeric_limits<float>::quiet_NaN() : range < kLeast ? 0.0f : range / 127.0f;
}

// Room for n rows of width k, and their rounding.
class Rounding {
 public:
  Rounding(int64_t n, int64_t k)
      : blocks_(BlocksOf(k)), numbers_(n * blocks_ * kBlockSize / int64_t(sizeof(float))), scales_(n * blocks_),
        starts_(n * blocks_) {}
  // Numbers [first, last) of a row, whole blocks but for the end of the row; x is where number `first` stands.
  void Round(const float* x, int64_t row, int64_t first, int64_t last) {
    int8_t* numbers = reinterpret_cast<int8_t*>(numbers_.data()) + row * blocks_ * kBlockSize;
    for (int64_t at = first; at < last; at += kBlockSize) {
      int64_t block = row * blocks_ + at / kBlockSize;
      RoundBlock(x + at - first, std::min(kBlockSize, last - at), numbers + at, scales_.data() + block,
                 reinterpret_cast<int32_t*>(starts_.data()) + block);
    }
  }
  RoundedRows rows() {
    return {reinterpret_cast<const int8_t*>(numbers_.data()), scales_.data(),
            reinterpret_cast<const int32_t*>(starts_.data()), blocks_};
  }

 private:
  int64_t blocks_;
  Aligned numbers_, scales_, starts_;
};

// Weights of a step and of kLanes outputs, made ready once for all rows; and what they add to the sums of one row, kStep
// products a lane. Bytes are multiplied unsigned by signed everywhere. Without the instructions of VNNI, pairs of products
// are summed in 16 bits, which saturate above 32,767: with the sign moved from the weight to the row no pair is above
// 2 * 127 * 127.
#if defined(__AVX512VNNI__)
struct Weights {
  __m512i raised;
};
static inline Weights Ready(const int8_t* p) {
  return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128))};
}
static inline Int Start(int32_t start) { return AllInts(start); }
static inline Int Dot(const Weights& w, int32_t x, Int sum) {
  return (Int)_mm512_dpbusd_epi32((__m512i)sum, w.raised, _mm512_set1_epi32(x));
}
#elif defined(__AVX512BW__)
struct Weights {
  __m512i size;
  __mmask64 is_below;
};
static inline Weights Ready(const int8_t* p) {
  __m512i all = _mm512_loadu_si512(p);
  return {_mm512_abs_epi8(all), _mm512_movepi8_mask(all)};
}
static inline Int Start(int32_t) { return Int{}; }
static inline Int Dot(const Weights& w, int32_t x, Int sum) {
  __m512i all = _mm512_set1_epi32(x);
  __m512i pairs = _mm512_maddubs_epi16(w.size, _mm512_mask_sub_epi8(all, w.is_below, _mm512_setzero_si512(), all));
  return sum + (Int)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
}
#else
struct Weights {
  __m256i all, size;
};
static inline Weights Ready(const int8_t* p) {
  __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return {all, _mm256_abs_epi8(all)};
}
static inline Int Start(int32_t) { return Int{}; }
static inline Int Dot(const Weights& w, int32_t x, Int sum) {
  __m256i pairs = _mm256_maddubs_epi16(w.size, _mm256_sign_epi8(_mm256_set1_epi32(x), w.all));
  return sum + (Int)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#endif

// The vectors of sums that a group has.
constexpr int kParts = kGroup / kLanes;

// A tile of kG groups, `apart` groups from one another, by kN rows: y[b * stride + a * apart * kGroup] and the kGroup - 1
// outputs behind it, of which the last group has only `valid`. `scale` is that of the first output. The sums in float32 lie
// in the nearest cache: they are needed once for 16 steps, and the registers hold the whole numbers.
template <int kG, int kN>
__attribute__((noinline)) static void GroupTile(const RoundedRows& x, const int8_t* w, int64_t apart, const float* scale,
                                                float* y, int64_t stride, int64_t valid) {
  constexpr int kO = kG * kParts;
  alignas(64) float sums[kO][kN][kLanes] = {};
  const int64_t k = x.blocks * kBlockSize;
  for (int64_t block = 0; block < x.blocks; block++) {
    Int acc[kO][kN];
#pragma GCC unroll 16
    for (int b = 0; b < kN; b++)
#pragma GCC unroll 16
      for (int a = 0; a < kO; a++) acc[a][b] = Start(x.starts[b * x.blocks + block]);
    const int8_t* numbers = x.numbers + block * kBlockSize;
    const int8_t* lines = w + block * kSteps * kLine;
#pragma GCC unroll 4
    for (int s = 0; s < kSteps; s++) {
      Weights ready[kO];
#pragma GCC unroll 16
      for (int a = 0; a < kO; a++) {
        const int8_t* line = lines + a / kParts * apart * kGroup * k + s * kLine;
        if (a % kParts == 0) Fetch<kG>(line);
        ready[a] = Ready(line + a % kParts * kLanes * kStep);
      }
#pragma GCC unroll 16
      for (int b = 0; b < kN; b++) {
        int32_t step;
        std::memcpy(&step, numbers + b * k + s * kStep, sizeof(step));
#pragma GCC unroll 16
        for (int a = 0; a < kO; a++) acc[a][b] = Dot(ready[a], step, acc[a][b]);
      }
    }
#pragma GCC unroll 16
    for (int b = 0; b < kN; b++)
#pragma GCC unroll 16
      for (int a = 0; a < kO; a++) {
        Vec whole = __builtin_convertvector(acc[a][b], Vec), scales = All(x.scales[b * x.blocks + block]);
        Vec sum = MulAdd(whole, scales, Load(sums[a][b]));
        std::memcpy(sums[a][b], &sum, sizeof(sum));
      }
  }
  for (int a = 0; a < kO; a++) {
    int64_t at = a / kParts * apart * kGroup + a % kParts * kLanes;
    int64_t count = std::clamp<int64_t>((a / kParts == kG - 1 ? valid : kGroup) - a % kParts * kLanes, 0, kLanes);
    for (int b = 0; b < kN; b++)
      for (int64_t i = 0; i < count; i++) y[b * stride + at + i] = sums[a][b][i] * scale[at + i];
  }
}

// Rows of a tile at most, and its groups: sums, weights and a step of a row fit the registers.
struct GroupShape {
  static constexpr int kRows = kLanes == 16 ? 8 : 4, kWide[] = {0, 4, 4, 4, 4, 3, 3, 2, 2};
  template <int kN>
  static constexpr int kStreams = kLanes == 16 ? kWide[kN] : kN == 1 ? 2 : 1;
};

// y[b, a] = x[b] . w[a] for rows b of [0, n) and outputs a of [first, last), of which the first begins a group; a row of y is
// `stride` wide.
[[maybe_unused]] static void GroupOutputs(const RoundedRows& x, const int8_t* w, const float* scale, float* y, int64_t n,
                                          int64_t stride, int64_t first, int64_t last) {
  int64_t all = (last - first + kGroup - 1) / kGroup;
  AllTiles<GroupShape>(n, all, [=](auto groups, auto rows, int64_t b, int64_t g, int64_t apart) {
    int64_t a = first + g * kGroup, valid = last - a - (groups - 1) * apart * kGroup;
    GroupTile<groups, rows>(x.From(b), w + a * x.blocks * kBlockSize, apart, scale + a, y + b * stride + a, stride,
                            std::min<int64_t>(valid, kGroup));
  });
}
