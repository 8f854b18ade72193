// Standard Gumbel noise, -log(-log(u)), from the bits of jax.random.bits (Threefry-2x32, 20 rounds, partitionable
// counters). All steps of a number are computed in registers.
//
// XLA on CPU runs each round as a loop over complete arrays in memory, which takes 9 to 22 ns per number. Each
// logarithm is one more loop of 6 ns per number.

#include "tiles.h"

constexpr int kVectors = 4;  // processed together, because each round of one vector waits for the round before

static inline Word Rotate(Word x, int by) { return (x << by) | (x >> (32 - by)); }

// Threefry-2x32 of the counters (0, i) .. (0, i + kVectors * kLanes - 1). The result is the xor of both words.
static inline void Bits(const uint32_t (&keys)[3], Word i, Word (&out)[kVectors]) {
  static constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  Word a[kVectors], b[kVectors];
  for (int v = 0; v < kVectors; v++) {
    a[v] = Word{} + keys[0];
    b[v] = i + uint32_t(v * kLanes) + keys[1];
  }
#pragma GCC unroll 5
  for (int step = 0; step < 5; step++) {
#pragma GCC unroll 4
    for (int round = 0; round < 4; round++) {
      const int by = kRotations[step % 2][round];
      for (int v = 0; v < kVectors; v++) {
        a[v] += b[v];
        b[v] = Rotate(b[v], by) ^ a[v];
      }
    }
    for (int v = 0; v < kVectors; v++) {
      a[v] += keys[(step + 1) % 3];
      b[v] += keys[(step + 2) % 3] + uint32_t(step + 1);
    }
  }
  for (int v = 0; v < kVectors; v++) out[v] = a[v] ^ b[v];
}

// The natural logarithm of positive normal numbers, within 1.5 units in the last place. With x = 2^e (1 + f), 1 + f in
// [sqrt(1/2), sqrt(2)): log(1 + f) = f - f^2 / 2 + f^3 P(f). P was fitted to the largest relative error by iterated
// least squares.
static inline Vec Log(Vec x) {
  constexpr uint32_t kRootHalf = 0x3f3504f3;
  const Word above = (Word)x - kRootHalf;
  const Vec e = __builtin_convertvector((Int)above >> 23, Vec);
  const Vec f = (Vec)((above & 0x007fffffu) + kRootHalf) - 1.0f;
  Vec p = f * 6.9210471e-2f - 1.1780702e-1f;
  p = p * f + 1.1865132e-1f;
  p = p * f - 1.2385552e-1f;
  p = p * f + 1.4220022e-1f;
  p = p * f - 1.6669216e-1f;
  p = p * f + 2.0002146e-1f;
  p = p * f - 2.4999986e-1f;
  p = p * f + 3.3333312e-1f;
  const Vec square = f * f;
  Vec low = p * f * square;
  low = e * -2.12194440e-4f + low;  // log(2) = 0.693359375, which has few bits, - 2.12194440e-4
  low = square * -0.5f + low;
  return e * 0.693359375f + (f + low);
}

static void Fill(const uint32_t* key, int64_t num, float* out) {
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA};
  constexpr int kBlock = kVectors * kLanes;
  Word lane;
  for (int j = 0; j < kLanes; j++) lane[j] = j;
  for (int64_t i = 0; i < num; i += kBlock) {
    Word bits[kVectors];
    Bits(keys, lane + uint32_t(i), bits);
    Vec noise[kVectors];
    for (int v = 0; v < kVectors; v++) {
      const Vec one_to_two = (Vec)((bits[v] >> 9) | 0x3F800000u);
      const Vec uniform = one_to_two - 1.0f, least = Vec{} + 1.17549435e-38f;  // the least normal number replaces 0
      noise[v] = -Log(-Log(uniform > least ? uniform : least));
    }
    std::memcpy(out + i, noise, std::min<int64_t>(kBlock, num - i) * sizeof(float));
  }
}

using Keys = ffi::Buffer<ffi::U32, 2>;
using Noise = ffi::Buffer<ffi::F32, 2>;

// noise[r, :] from the key [r, 2]. A row whose flag is false gets zeros. Without flags all rows are active.
static ffi::Error Gumbel(ffi::ThreadPool pool, Keys keys, Flags flags, ffi::Result<Noise> noise) {
  int64_t rows = noise->dimensions()[0], num = noise->dimensions()[1];
  if (keys.dimensions()[0] != rows || keys.dimensions()[1] != 2 || num >= (int64_t(1) << 32))
    return ffi::Error::InvalidArgument("gumbel: keys must be [rows, 2] and rows shorter than 2^32");
  const auto* key = keys.typed_data();
  float* to = noise->typed_data();
  return ByRows(
      pool, flags, rows, num, [=](int64_t r) { Fill(key + 2 * r, num, to + r * num); },
      [=](int64_t r) { std::memset(to + r * num, 0, num * sizeof(float)); });
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdGumbel, Gumbel);
