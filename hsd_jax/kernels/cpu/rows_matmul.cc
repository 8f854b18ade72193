// y_i = x . W_i^T for the rows of x [N, K] that count and several weights W_i [O_i, K] in float32, bfloat16 or 8 bits
// with a scale an output (as they are or in groups, `integers.h`). Sums are in float32.
//
// XLA's CPU product packs the weights for every call, which costs more than the product itself when N is 2 to 32.
// This one streams every weight once for 64 rows, which stay in the near caches.
// Built on first use by kernels/native.py; nothing here is needed for correctness.

#include "tiles.h"

struct Product {
  Matrix w;
  float* y;
};

struct Shard {
  int product;
  int64_t first, last;
};

static ffi::Error RowsMatmul(ffi::ThreadPool pool, FloatRows x, Flags flags,
                             ffi::RemainingArgs weights, ffi::RemainingRets results) {
  int64_t rows = x.dimensions()[0], k = x.dimensions()[1];
  if (k < 1) return ffi::Error::InvalidArgument("rows_matmul: rows of no width");
  if (!Fit(flags, rows)) return ffi::Error::InvalidArgument("rows_matmul: a flag a row, or none");
  std::vector<Product> products;
  std::vector<Shard> shards;
  Forms forms;
  int64_t bytes = 0, output = 0, cut = 1;
  for (size_t i = 0, next = 0; i < results.size(); i++) {
    auto y = results.get<ffi::AnyBuffer>(i);
    Matrix matrix;
    if (y.has_error() || !NextMatrix(weights, &next, k, &matrix))
      return ffi::Error::InvalidArgument("rows_matmul: weights must be [out, in] in float32, bfloat16 or scaled int8");
    forms.Add(matrix);
    products.push_back({matrix, static_cast<float*>((*y)->untyped_data())});
    bytes += matrix.bytes();
    output = std::max(output, matrix.output());
    cut = std::max(cut, matrix.cut());
  }
  int64_t pieces = Pieces(bytes, output, cut, Threads(pool));
  for (size_t i = 0; i < products.size(); i++) {
    const Matrix& w = products[i].w;
    int64_t own = std::max<int64_t>((w.bytes() * pieces + bytes / 2) / std::max<int64_t>(bytes, 1), 1);
    for (int64_t p = 0; p < own; p++)
      shards.push_back({static_cast<int>(i), w.CutAt(p, own), w.CutAt(p + 1, own)});
  }
  Packed packed(x, flags, forms);
  int pieces_of_rows = packed.pieces(), count = static_cast<int>(shards.size());
  auto work = [packed = std::move(packed), products = std::move(products),
               shards = std::move(shards)](int phase, int i, int) mutable {
    if (phase == 0) return packed.FillPiece(i);
    const Shard& s = shards[i];
    const Product& p = products[s.product];
    Outputs(packed.rows(), p.w, p.y, packed.n, p.w.o, s.first, s.last);
    packed.active.Spread(p.y, p.w.o, s.first, s.last);
  };
  Phases(pool, {pieces_of_rows, count}, std::move(work));
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(HsdRowsMatmul, RowsMatmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<FloatRows>()
                                  .Arg<Flags>()
                                  .RemainingArgs()
                                  .RemainingRets());
