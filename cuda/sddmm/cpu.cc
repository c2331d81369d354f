// bsjax_sddmm for the CPU platform: checks the operands and spreads the stored blocks over XLA's thread pool.
#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/cpu/tasks.h"
#include "cuda/sddmm/check.h"
#include "xla/ffi/api/ffi.h"

namespace bsjax {
namespace {

ffi::Error SddmmCpuImpl(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::AnyBuffer rows,
                        ffi::AnyBuffer cols, ffi::AnyBuffer schedule, ffi::Result<ffi::AnyBuffer> dblocks, bool tf32,
                        int32_t config) {
  SddmmArgs args;
  ffi::Error error = CheckSddmm(x, dy, rows, cols, schedule, *dblocks, tf32, &args);
  if (error.success()) error = CheckSeal("bsjax_sddmm", args.seal);
  if (error.failure()) return error;
  if (config != -1 && config != 0) {
    return ffi::Error::InvalidArgument("bsjax_sddmm: config must be -1 or 0 on the CPU; got " + std::to_string(config) +
                                       ".");
  }
  if (args.num_groups == 0 || args.num_blocks == 0) return ffi::Error::Success();

  const int64_t block_work = static_cast<int64_t>(args.block_size) * args.block_size * (args.m + 1);
  // One task a thread: blocks cost the same, and each task reads all rows of dy.
  const int64_t num_tasks = NumTasks(pool, args.num_groups * args.num_blocks * block_work, 1);
  const int64_t num_cuts = std::clamp<int64_t>(num_tasks / args.num_groups, 1, args.num_blocks);
  auto run = [=, &kernels = ChooseCpuKernels()](int64_t tile) {
    const int64_t cut = tile % num_cuts, group = tile / num_cuts;
    kernels.sddmm(args, group, cut * args.num_blocks / num_cuts, (cut + 1) * args.num_blocks / num_cuts);
  };
  const int64_t num_tiles = args.num_groups * num_cuts;
  if (num_tasks == 1) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) run(tile);
  } else {
    RunTasks(pool, num_tiles, run);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace bsjax

XLA_FFI_DEFINE_HANDLER_SYMBOL(BsjaxSddmmCpu, bsjax::SddmmCpuImpl,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()  // x [g or 1, ..., k]
                                  .Arg<xla::ffi::AnyBuffer>()  // dy [g or 1, ..., n]
                                  .Arg<xla::ffi::AnyBuffer>()  // rows [num_blocks]
                                  .Arg<xla::ffi::AnyBuffer>()  // cols [num_blocks]
                                  .Arg<xla::ffi::AnyBuffer>()  // schedule, of which the seal is read
                                  .Ret<xla::ffi::AnyBuffer>()  // dblocks [g, num_blocks, b, b]
                                  .Attr<bool>("tf32")
                                  .Attr<int32_t>("config"));
