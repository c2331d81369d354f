// The CUDA handler of bsjax_sddmm: check, choose, launch. Compiled by the C++ compiler alone.
#include "xla/ffi/api/ffi.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "cuda/check_cuda.h"
#include "cuda/sddmm/args.h"
#include "cuda/sddmm/check.h"
#include "cuda/sddmm/config.h"
#include "cuda/sddmm/sm80.h"
#include "cuda/sddmm/sm90.h"

namespace bsjax {
namespace {

ffi::Error SddmmImpl(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer dy, ffi::AnyBuffer rows, ffi::AnyBuffer cols,
                     ffi::AnyBuffer schedule, ffi::Result<ffi::AnyBuffer> dblocks, bool tf32, int32_t config) {
  SddmmArgs args;
  ffi::Error error = CheckSddmm(x, dy, rows, cols, schedule, *dblocks, tf32, &args);
  if (error.failure()) return error;
  int arch = 0;
  error = CurrentArch("bsjax_sddmm", &arch);
  if (error.failure()) return error;
  if (config == -1) config = ChooseSddmmConfig(args, arch);
  if (!SddmmConfigFits(config, args, arch)) {
    return ffi::Error::InvalidArgument(
        "bsjax_sddmm: `config` must be -1 (choose) or one of 0 to " + std::to_string(kNumSddmmConfigs - 1) +
        " that serves this dtype, with this schedule, on this device; got " + std::to_string(config) + ".");
  }
  if (kSddmmConfigs[config].arch == 90) return FromCuda("SddmmKernelSm90", LaunchSddmmSm90(args, config, stream));
  return FromCuda("SddmmKernelSm80", LaunchSddmmSm80(args, config, stream));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(BsjaxSddmmCuda, SddmmImpl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()  // x [g or 1, m, k]
                                  .Arg<ffi::AnyBuffer>()  // dy [g or 1, m, n]
                                  .Arg<ffi::AnyBuffer>()  // rows [z]
                                  .Arg<ffi::AnyBuffer>()  // cols [z]
                                  .Arg<ffi::AnyBuffer>()  // schedule, as sddmm/schedule.h says
                                  .Ret<ffi::AnyBuffer>()  // dblocks [g, z, b, b]
                                  .Attr<bool>("tf32")
                                  .Attr<int32_t>("config"),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace bsjax
