// bsjax._native: every handler by name, for each platform that this build serves. The only file that knows pybind11.
#include <pybind11/pybind11.h>

#if BSJAX_WITH_CUDA
#include "sddmm_config.h"
#include "spmm_config.h"
#endif
#include "xla/ffi/api/c_api.h"

namespace py = pybind11;

extern "C" {
XLA_FFI_Error* BsjaxSpmmCpu(XLA_FFI_CallFrame*);
XLA_FFI_Error* BsjaxSddmmCpu(XLA_FFI_CallFrame*);
#if BSJAX_WITH_CUDA
XLA_FFI_Error* BsjaxSpmmCuda(XLA_FFI_CallFrame*);
XLA_FFI_Error* BsjaxSddmmCuda(XLA_FFI_CallFrame*);
#endif
}

namespace {

py::capsule Capsule(XLA_FFI_Handler* handler) { return py::capsule(reinterpret_cast<void*>(handler)); }

// {platform: {target: capsule}}, as jax.ffi.register_ffi_target takes them.
py::dict Registrations() {
  py::dict platforms;
  py::dict cpu;
  cpu["bsjax_spmm"] = Capsule(BsjaxSpmmCpu);
  cpu["bsjax_sddmm"] = Capsule(BsjaxSddmmCpu);
  platforms["cpu"] = cpu;
#if BSJAX_WITH_CUDA
  py::dict cuda;
  cuda["bsjax_spmm"] = Capsule(BsjaxSpmmCuda);
  cuda["bsjax_sddmm"] = Capsule(BsjaxSddmmCuda);
  platforms["CUDA"] = cuda;
#endif
  return platforms;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native handlers of bsjax for XLA's typed FFI.";
  m.def("registrations", &Registrations);
  m.attr("ffi_version") = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#if BSJAX_WITH_CUDA
  m.attr("cuda_version") = BSJAX_CUDA_VERSION;  // of the nvcc that built it, "13.0"
  // How many values the attribute `config` takes, for the tests that sweep it.
  m.attr("num_cuda_configs") =
      py::dict(py::arg("bsjax_spmm") = bsjax::kNumSpmmConfigs, py::arg("bsjax_sddmm") = bsjax::kNumSddmmConfigs);
  m.attr("cuda_architectures") = BSJAX_CUDA_ARCHITECTURES;  // "sm_80 sm_90a compute_90"
#else
  m.attr("cuda_version") = py::none();
  m.attr("cuda_architectures") = "";
#endif
}
