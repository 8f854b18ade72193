// The bits of jax.random.bits (Threefry-2x32, 20 rounds, partitionable counters).
//
// XLA on CPU runs the rounds as a loop over whole arrays, which pass through memory each time: 9 to 22 ns a number.

#include "tiles.h"

static inline uint32_t Rotate(uint32_t x, int by) { return (x << by) | (x >> (32 - by)); }

// Threefry-2x32 of the counters (0, 0) .. (0, num - 1); out holds the xor of both words.
static void Fill(uint32_t key0, uint32_t key1, int64_t num, uint32_t* out) {
  static constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key0, key1, key0 ^ key1 ^ 0x1BD11BDA};
  constexpr int kBlock = 8;  // numbers at once: a vector register
  int64_t i = 0;
  auto block = [&](int64_t count) {
    uint32_t a[kBlock], b[kBlock];
    for (int j = 0; j < kBlock; j++) {
      a[j] = keys[0];
      b[j] = uint32_t(i + j) + keys[1];
    }
#pragma GCC unroll 5
    for (int step = 0; step < 5; step++) {
#pragma GCC unroll 4
      for (int round = 0; round < 4; round++) {
        const int by = kRotations[step % 2][round];
        for (int j = 0; j < kBlock; j++) {
          a[j] += b[j];
          b[j] = Rotate(b[j], by) ^ a[j];
        }
      }
      for (int j = 0; j < kBlock; j++) {
        a[j] += keys[(step + 1) % 3];
        b[j] += keys[(step + 2) % 3] + uint32_t(step + 1);
      }
    }
    for (int64_t j = 0; j < count; j++) out[i + j] = a[j] ^ b[j];
  };
  for (; i + kBlock <= num; i += kBlock) block(kBlock);
  if (i < num) block(num - i);
}

using Words2 = ffi::Buffer<ffi::U32, 2>;

// bits[r, :] of the key [r, 2].
static ffi::Error RandomBits(ffi::ThreadPool pool, Words2 keys, ffi::ResultBuffer<ffi::U32, 2> bits) {
  int64_t rows = bits->dimensions()[0], num = bits->dimensions()[1];
  if (keys.dimensions()[0] != rows || keys.dimensions()[1] != 2 || num >= (int64_t(1) << 32))
    return ffi::Error::InvalidArgument("random_bits: keys are [rows, 2], rows shorter than 2^32");
  ByRows(pool, rows, num, 8 << 10, [=, key = keys.typed_data(), to = bits->typed_data()](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) Fill(key[2 * r], key[2 * r + 1], num, to + r * num);
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdRandomBits, RandomBits, ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Words2>().Ret<Words2>());
