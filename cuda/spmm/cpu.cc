// bsjax_spmm for the CPU platform: checks the operands and spreads tiles of y over XLA's thread pool.
#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/cpu/tasks.h"
#include "cuda/spmm/check.h"
#include "xla/ffi/api/ffi.h"

namespace bsjax {
namespace {

// One task computes columns of blocks over a panel of rows. A taller panel reads each block fewer times; 128 rows, the
// most that the kernel takes at once, were no slower than fewer up to k = 4096, where they overflow a second-level
// cache of 1 MiB (EPYC 9005).
int64_t PanelRows(const SpmmArgs& args) {
  return std::clamp<int64_t>((int64_t{1} << 19) / std::max<int64_t>(args.k, 1) / 8 * 8, 32, 128);
}

ffi::Error SpmmCpuImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer blocks, ffi::AnyBuffer indptr,
                       ffi::AnyBuffer indices, ffi::AnyBuffer block_ids, ffi::AnyBuffer schedule,
                       ffi::Result<ffi::AnyBuffer> y, bool transpose, bool tf32, int32_t config) {
  SpmmArgs args;
  ffi::Error error = CheckSpmm(x, blocks, indptr, indices, block_ids, schedule, *y, transpose, tf32, &args);
  if (error.success()) error = CheckSeal("bsjax_spmm", args.seal);
  if (error.failure()) return error;
  if (config != -1 && config != 0) {
    return ffi::Error::InvalidArgument("bsjax_spmm: config must be -1 or 0 on the CPU; got " + std::to_string(config) +
                                       ".");
  }
  const int64_t num_columns = args.n / args.block_size;
  if (args.num_groups == 0 || args.m == 0 || num_columns == 0) return ffi::Error::Success();

  const int64_t panel_rows = PanelRows(args);
  const int64_t num_panels = (args.m + panel_rows - 1) / panel_rows;
  const int64_t block_work = static_cast<int64_t>(args.block_size) * args.block_size;
  const int64_t work = args.num_groups * args.m * (args.num_blocks * block_work + args.n);
  // Four tasks a thread, so that one of long lists does not leave the other threads idle.
  const int64_t num_tasks = NumTasks(pool, work, 4);
  // Columns are cut only where groups and panels alone are too few.
  const int64_t num_cuts = std::clamp<int64_t>(num_tasks / (args.num_groups * num_panels), 1, num_columns);
  auto run = [=, &kernels = ChooseCpuKernels()](int64_t tile) {
    const int64_t cut = tile % num_cuts, panel = tile / num_cuts % num_panels, group = tile / num_cuts / num_panels;
    kernels.spmm(args, group, panel * panel_rows, std::min(args.m, (panel + 1) * panel_rows),
                 cut * num_columns / num_cuts, (cut + 1) * num_columns / num_cuts);
  };
  const int64_t num_tiles = args.num_groups * num_panels * num_cuts;
  if (num_tasks == 1) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) run(tile);
  } else {
    RunTasks(pool, num_tiles, run);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace bsjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(BsjaxSpmmCpu, bsjax::SpmmCpuImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x [g or 1, ..., k]
                                  .Arg<xla::ffi::AnyBuffer>()  // blocks [g or 1, num_blocks, b, b]
                                  .Arg<xla::ffi::AnyBuffer>()  // indptr [n / b + 1]
                                  .Arg<xla::ffi::AnyBuffer>()  // indices [num_blocks]
                                  .Arg<xla::ffi::AnyBuffer>()  // block_ids [num_blocks]
                                  .Arg<xla::ffi::AnyBuffer>()  // schedule, of which the seal is read
                                  .Ret<xla::ffi::AnyBuffer>()  // y [g, ..., n]
                                  .Attr<bool>("transpose")
                                  .Attr<bool>("tf32")
                                  .Attr<int32_t>("config"));
