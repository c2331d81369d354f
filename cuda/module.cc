// bsjax._native: every handler by name, for each platform that this build serves. The only file that knows pybind11.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#if BSJAX_WITH_CUDA
#include "cuda/sddmm/config.h"
#include "cuda/spmm/config.h"
#endif
#include "cuda/sddmm/schedule.h"
#include "cuda/seal.h"
#include "cuda/spmm/schedule.h"
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

// A one-dimensional int32 array that its caller keeps. By Python's buffer protocol: pybind11's NumPy part needs a
// thread-local variable of libstdc++, which this file's TLS model cannot reach.
struct Indices {
  py::buffer_info info;
  const int32_t* data = nullptr;
  int64_t size = 0;

  explicit Indices(const py::buffer& buffer) : info(buffer.request()) {
    if (info.ndim != 1 || info.itemsize != 4 || info.format != py::format_descriptor<int32_t>::format() ||
        (info.size > 1 && info.strides[0] != 4)) {
      throw py::value_error("lists must be one-dimensional contiguous int32 arrays");
    }
    data = static_cast<const int32_t*>(info.ptr);
    size = info.size;
  }
};

py::bytes ToBytes(const std::vector<int32_t>& words) {
  return py::bytes(reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int32_t));
}

void CheckSizes(int64_t block_size, int64_t k, int64_t n) {
  const bool serves = block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64 || block_size == 128;
  if (!serves || k < 0 || n < 0 || k % block_size != 0 || n % block_size != 0) {
    throw py::value_error("block_size must be 8, 16, 32, 64 or 128, and k and n multiples of it");
  }
}

// The schedule of x[m, k] @ op(w) = y[m, n], as the bytes of int32 words: a header alone where there is none.
py::bytes MakeSpmmSchedule(const py::buffer& indptr_buffer, const py::buffer& indices_buffer,
                           const py::buffer& ids_buffer, int64_t k, int64_t n, int64_t block_size) {
  CheckSizes(block_size, k, n);
  const Indices indptr(indptr_buffer), indices(indices_buffer), ids(ids_buffer);
  if (indptr.size != n / block_size + 1 || ids.size != indices.size) {
    throw py::value_error("indptr must have one entry more than n / block_size, and block_ids those of indices");
  }
  std::vector<int32_t> schedule(bsjax::kScheduleHeaderWords);
  bsjax::WriteScheduleHeader(schedule.data());
  if (bsjax::SpmmSchedule::Serves(block_size)) {
    schedule.resize(schedule.size() + bsjax::SpmmSchedule(k, n, block_size, indices.size).size);
    if (!bsjax::ScheduleSpmm(indptr.data, indices.data, ids.data, k, n, block_size, indices.size,
                             schedule.data() + bsjax::kScheduleHeaderWords)) {
      throw py::value_error("lists must name no place twice");
    }
  }
  return ToBytes(schedule);
}

// The form of that schedule, for who makes it elsewhere: its numbers as spmm/schedule.h names them, and where its
// sections begin, in words. Empty where there is no schedule.
py::dict SpmmScheduleForm(int64_t k, int64_t n, int64_t block_size, int64_t num_blocks) {
  CheckSizes(block_size, k, n);
  using S = bsjax::SpmmSchedule;
  py::dict form;
  if (!S::Serves(block_size)) return form;
  const S s(k, n, block_size, num_blocks);
  form["unit_cols"] = int{S::kUnitCols};
  form["group_units"] = int{S::kUnits};
  form["tile_cols"] = int{S::kTileCols};
  form["tile_bytes"] = int{S::kTileBytes};
  form["stage_tiles"] = int{S::kTiles};
  form["max_blocks"] = S::MaxBlocks(block_size);
  form["num_units"] = s.num_units;
  form["num_groups"] = s.num_groups;
  form["max_stages"] = s.max_stages;
  py::dict sections;
  constexpr int64_t kBegin = bsjax::kScheduleHeaderWords;
  sections["units"] = kBegin;
  sections["stage_begin"] = kBegin + s.stage_begin;
  sections["tiles"] = kBegin + s.tiles;
  sections["entry_begin"] = kBegin + s.entry_begin;
  sections["places"] = kBegin + s.places;
  sections["block_ids"] = kBegin + s.block_ids;
  sections["offsets"] = kBegin + s.offsets;
  form["sections"] = sections;
  form["size"] = kBegin + s.size;
  return form;
}

// The schedule of x[m, k].T @ dy[m, n] at the blocks, likewise.
py::bytes MakeSddmmSchedule(const py::buffer& rows_buffer, const py::buffer& cols_buffer, int64_t k, int64_t n,
                            int64_t block_size) {
  CheckSizes(block_size, k, n);
  const Indices rows(rows_buffer), cols(cols_buffer);
  if (rows.size != cols.size) throw py::value_error("rows and cols must have one entry a block");
  const auto table = bsjax::MakeSddmmSchedule(rows.data, cols.data, rows.size, static_cast<int>(block_size), k, n);
  std::vector<int32_t> schedule(bsjax::kScheduleHeaderWords);
  bsjax::WriteScheduleHeader(schedule.data(), static_cast<int32_t>(table.num_bins));
  schedule.insert(schedule.end(), table.bins.begin(), table.bins.end());
  return ToBytes(schedule);
}

// The form of that schedule, likewise: as sddmm/schedule.h names it.
py::dict SddmmScheduleForm(int64_t k, int64_t n, int64_t block_size, int64_t num_blocks) {
  CheckSizes(block_size, k, n);
  using Bin = bsjax::SddmmBin;
  const int b = static_cast<int>(block_size);
  const Bin bin{b};
  const bsjax::SddmmCut cut = bsjax::SpreadSddmmCut(k, n, b, num_blocks);
  const int64_t max_bins = bsjax::SddmmMaxBins(k, n, b, num_blocks);
  py::dict form;
  form["tile_cols"] = int{Bin::kTileCols};
  form["workers"] = bin.Workers();
  form["slots"] = bin.Slots();
  form["slot_blocks"] = bin.SlotBlocks();
  form["max_tiles"] = bin.MaxTiles();
  form["unit_tiles"] = bin.UnitTiles();
  form["cut_x_tiles"] = cut.x_tiles;
  form["cut_y_tiles"] = cut.y_tiles;
  form["cut_blocks"] = cut.bin_blocks;
  form["max_bins"] = max_bins;
  form["words"] = bin.Words();
  form["tiles_at"] = int{Bin::kHeaderWords};
  form["descriptors_at"] = bin.DescriptorsAt();
  form["ids_at"] = bin.IdsAt();
  form["dy_tile"] = int32_t{Bin::kDyTile};
  form["load_x"] = uint32_t{Bin::kLoadX};
  form["load_dy"] = uint32_t{Bin::kLoadDy};
  form["compute"] = uint32_t{Bin::kCompute};
  form["transposed"] = uint32_t{Bin::kTransposed};
  form["begin"] = int{bsjax::kScheduleHeaderWords};
  form["size"] = bsjax::kScheduleHeaderWords + max_bins * bin.Words();
  return form;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native handlers of bsjax for XLA's typed FFI.";
  m.def("registrations", &Registrations);
  m.def("spmm_schedule", &MakeSpmmSchedule);
  m.def("spmm_schedule_form", &SpmmScheduleForm);
  m.def("sddmm_schedule", &MakeSddmmSchedule);
  m.def("sddmm_schedule_form", &SddmmScheduleForm);
  m.attr("seal") = int32_t{bsjax::kSeal};
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
