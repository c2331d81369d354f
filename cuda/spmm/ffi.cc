// The CUDA handler of bsjax_spmm: check, choose, launch. Compiled by the C++ compiler alone.
#include "xla/ffi/api/ffi.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/check_cuda.h"
#include "cuda/spmm/args.h"
#include "cuda/spmm/check.h"
#include "cuda/spmm/config.h"
#include "cuda/spmm/sm80.h"
#include "cuda/spmm/sm90.h"
#include "cuda/spmm/sm90_staged.h"

namespace bsjax {
namespace {

ffi::Error SpmmImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer blocks, ffi::AnyBuffer indptr,
                    ffi::AnyBuffer indices, ffi::AnyBuffer block_ids, ffi::AnyBuffer schedule,
                    ffi::Result<ffi::AnyBuffer> y, bool transpose, bool tf32, int32_t config) {
  SpmmArgs args;
  ffi::Error error = CheckSpmm(x, blocks, indptr, indices, block_ids, schedule, *y, transpose, tf32, &args);
  if (error.failure()) return error;
  int arch = 0;
  error = CurrentArch("bsjax_spmm", &arch);
  if (error.failure()) return error;
  if (config == -1) config = ChooseSpmmConfig(args, arch);
  if (!SpmmConfigFits(config, args, arch)) {
    return ffi::Error::InvalidArgument(
        "bsjax_spmm: `config` must be -1 (choose) or one of 0 to " + std::to_string(kNumSpmmConfigs - 1) +
        " that serves this dtype, block size and number of rows, with this schedule, on this device; got " +
        std::to_string(config) + ".");
  }
  const int split = kSpmmConfigs[config].split;
  if (split > 0) return FromCuda("SpmmStagedKernelSm90", LaunchSpmmStagedSm90(args, split, stream));
  if (kSpmmConfigs[config].arch == 90) return FromCuda("SpmmKernelSm90", LaunchSpmmSm90(args, config, stream));
  return FromCuda("SpmmKernelSm80", LaunchSpmmSm80(args, config, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BsjaxSpmmCuda, SpmmImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // x [g or 1, m, k]
                                  .Arg<ffi::AnyBuffer>()  // blocks [g or 1, z, b, b]
                                  .Arg<ffi::AnyBuffer>()  // indptr [n / b + 1]
                                  .Arg<ffi::AnyBuffer>()  // indices [z]
                                  .Arg<ffi::AnyBuffer>()  // block_ids [z]
                                  .Arg<ffi::AnyBuffer>()  // schedule, as spmm/schedule.h says
                                  .Ret<ffi::AnyBuffer>()  // y [g, m, n]
                                  .Attr<bool>("transpose")
                                  .Attr<bool>("tf32")
                                  .Attr<int32_t>("config"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace bsjax
