// y_i = x . W_i^T for a few rows x [N, K] and several weights W_i [O_i, K] in float32 or bfloat16, float32 inside.
//
// XLA's CPU product packs the weights for every call, which costs more than the product itself when N is 2 to 32.
// This one streams every weight once and keeps the rows in the first-level cache.
// Built on first use by models/native.py; nothing here is needed for correctness.

#include "tiles.h"

struct Product {
  Matrix w;
  float* y;
};

struct Shard {
  int product;
  int64_t first, last;
};

static ffi::Error RowsMatmul(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs weights,
                             ffi::RemainingRets results) {
  int64_t n = x.dimensions()[0], k = x.dimensions()[1];
  if (k < 1) return ffi::Error::InvalidArgument("rows_matmul: rows of no width");
  std::vector<Product> products;
  std::vector<Shard> shards;
  bool any_bf16 = false;
  int64_t bytes = 0, output = 0;
  for (size_t i = 0; i < weights.size(); i++) {
    auto w = weights.get<ffi::AnyBuffer>(i);
    auto y = results.get<ffi::AnyBuffer>(i);
    if (w.has_error() || y.has_error()) return ffi::Error::InvalidArgument("rows_matmul: bad buffer");
    Matrix matrix;
    if (!AsMatrix(*w, k, &matrix))
      return ffi::Error::InvalidArgument("rows_matmul: weights must be [out, in] in float32 or bfloat16");
    any_bf16 |= matrix.is_bf16;
    products.push_back({matrix, static_cast<float*>((*y)->untyped_data())});
    bytes += matrix.bytes();
    output = std::max(output, matrix.output());
  }
  int64_t pieces = Pieces(bytes, output, Threads(pool));
  for (size_t i = 0; i < products.size(); i++) {
    const Matrix& w = products[i].w;
    int64_t own = std::max<int64_t>((w.bytes() * pieces + bytes / 2) / std::max<int64_t>(bytes, 1), 1);
    for (int64_t p = 0; p < own; p++)
      shards.push_back({static_cast<int>(i), CutAt(w.o, p, own), CutAt(w.o, p + 1, own)});
  }
  Aligned paired(any_bf16 ? n * k : 0);
  if (any_bf16) Deinterleave(x.typed_data(), n, k, paired.data());
  int count = static_cast<int>(shards.size());
  auto work = [rows = x.typed_data(), n, paired = std::move(paired), products = std::move(products),
               shards = std::move(shards)](int i) mutable {
    const Shard& s = shards[i];
    const Product& p = products[s.product];
    Outputs({rows, paired.data()}, p.w, p.y, n, p.w.o, s.first, s.last);
  };
  Parallel(pool, count, std::move(work));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdRowsMatmul, RowsMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
