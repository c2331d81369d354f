#include "check.h"

#include "sddmm_schedule.h"
#include "seal.h"
#include "spmm_schedule.h"

namespace bsjax {
namespace {

using Dims = ffi::Span<const int64_t>;

#define BSJAX_RETURN_IF_ERROR(expr)      \
  do {                                   \
    ffi::Error error_ = (expr);          \
    if (error_.failure()) return error_; \
  } while (false)

std::string Show(Dims dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

ffi::Error Refuse(const char* op, const std::string& what) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + what + ".");
}

bool Serves(int64_t block_size) {
  return block_size == 8 || block_size == 16 || block_size == 32 || block_size == 64 || block_size == 128;
}

ffi::Error ToDType(const char* op, ffi::DataType type, DType* dtype) {
  switch (type) {
    case ffi::DataType::F32:
      *dtype = DType::kF32;
      return ffi::Error::Success();
    case ffi::DataType::F16:
      *dtype = DType::kF16;
      return ffi::Error::Success();
    case ffi::DataType::BF16:
      *dtype = DType::kBF16;
      return ffi::Error::Success();
    default:
      return Refuse(op, "operands must be float32, float16 or bfloat16; got XLA element type " +
                            std::to_string(static_cast<int>(type)));
  }
}

ffi::Error CheckIndices(const char* op, const char* name, const ffi::AnyBuffer& buffer) {
  if (buffer.element_type() != ffi::DataType::S32) return Refuse(op, std::string(name) + " must be int32");
  if (buffer.dimensions().size() != 1) {
    return Refuse(op, std::string(name) + " must have 1 dimension; got " + Show(buffer.dimensions()));
  }
  return ffi::Error::Success();
}

// Whether a schedule has a body of `size` words behind its header, none, or a size that no schedule has.
ffi::Error CheckSchedule(const char* op, const ffi::AnyBuffer& schedule, int64_t size, bool* has_body) {
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "schedule", schedule));
  const int64_t words = static_cast<int64_t>(schedule.element_count());
  *has_body = size > 0 && words == kScheduleHeaderWords + size;
  if (*has_body || words == kScheduleHeaderWords) return ffi::Error::Success();
  return Refuse(op, "schedule must have " + std::to_string(kScheduleHeaderWords) + " words (none) or the " +
                        std::to_string(kScheduleHeaderWords + size) + " of a layout of these sizes; got " +
                        std::to_string(words));
}

int64_t Product(Dims dims, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t i = begin; i < end; ++i) product *= dims[i];
  return product;
}

// Whether two activations [g, ..., f] have the same rows; f and g may differ.
bool SameRows(Dims a, Dims b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 1; i + 1 < a.size(); ++i) {
    if (a[i] != b[i]) return false;
  }
  return true;
}

// The number of groups that `ours` brings to a call with `groups` groups so far: equal, or 1 and so shared.
bool JoinGroups(int64_t ours, int64_t* groups) {
  if (ours == *groups || ours == 1) return true;
  if (*groups != 1) return false;
  *groups = ours;
  return true;
}

}  // namespace

ffi::Error CheckSpmm(const ffi::AnyBuffer& x, const ffi::AnyBuffer& blocks, const ffi::AnyBuffer& indptr,
                     const ffi::AnyBuffer& indices, const ffi::AnyBuffer& block_ids, const ffi::AnyBuffer& schedule,
                     ffi::AnyBuffer& y, bool transpose, bool tf32, SpmmArgs* args) {
  const char* op = "bsjax_spmm";
  BSJAX_RETURN_IF_ERROR(ToDType(op, x.element_type(), &args->dtype));
  if (blocks.element_type() != x.element_type() || y.element_type() != x.element_type()) {
    return Refuse(op, "x, blocks and y must have one dtype");
  }
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "indptr", indptr));
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "indices", indices));
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "block_ids", block_ids));
  const Dims xd = x.dimensions(), wd = blocks.dimensions(), yd = y.dimensions();
  if (xd.size() < 2 || wd.size() != 4 || yd.size() < 2) {
    return Refuse(op, "x and y must be [g, ..., features] and blocks must have 4 dimensions; got " + Show(xd) + ", " +
                          Show(yd) + " and " + Show(wd));
  }
  const int64_t k = xd[xd.size() - 1], n = yd[yd.size() - 1], m = Product(xd, 1, xd.size() - 1);
  const int64_t b = wd[3];
  if (wd[2] != b || !Serves(b)) {
    return Refuse(op, "blocks must be square with side 8, 16, 32, 64 or 128; got " + Show(wd));
  }
  int64_t groups = 1;
  if (!JoinGroups(xd[0], &groups) || !JoinGroups(wd[0], &groups) || yd[0] != groups) {
    return Refuse(op,
                  "the groups of x, blocks and y must agree; got " + Show(xd) + ", " + Show(wd) + " and " + Show(yd));
  }
  const int64_t lists = static_cast<int64_t>(indptr.element_count());
  if (!SameRows(xd, yd) || k % b != 0 || n != (lists - 1) * b) {
    return Refuse(op, "x " + Show(xd) + ", y " + Show(yd) + " and indptr " + Show(indptr.dimensions()) +
                          " do not fit blocks of side " + std::to_string(b));
  }
  if (static_cast<int64_t>(indices.element_count()) != wd[1] ||
      static_cast<int64_t>(block_ids.element_count()) != wd[1]) {
    return Refuse(op, "indices and block_ids must have one entry a block of " + Show(wd));
  }
  args->x = x.untyped_data();
  args->blocks = blocks.untyped_data();
  args->indptr = static_cast<const int32_t*>(indptr.untyped_data());
  args->indices = static_cast<const int32_t*>(indices.untyped_data());
  args->block_ids = static_cast<const int32_t*>(block_ids.untyped_data());
  bool has_schedule = false;
  const int64_t schedule_size = SpmmSchedule::Serves(b) ? SpmmSchedule(k, n, b, wd[1]).size : 0;
  BSJAX_RETURN_IF_ERROR(CheckSchedule(op, schedule, schedule_size, &has_schedule));
  args->seal = static_cast<const int32_t*>(schedule.untyped_data());
  args->schedule = has_schedule ? args->seal + kScheduleHeaderWords : nullptr;
  args->y = y.untyped_data();
  args->num_groups = groups;
  args->m = m;
  args->k = k;
  args->n = n;
  args->x_group_stride = xd[0] == 1 ? 0 : m * k;
  args->num_blocks = wd[1];
  args->blocks_group_stride = wd[0] == 1 ? 0 : wd[1] * b * b;
  args->block_size = static_cast<int32_t>(b);
  args->transpose = transpose;
  args->tf32 = tf32;
  return ffi::Error::Success();
}

ffi::Error CheckSddmm(const ffi::AnyBuffer& x, const ffi::AnyBuffer& dy, const ffi::AnyBuffer& rows,
                      const ffi::AnyBuffer& cols, const ffi::AnyBuffer& schedule, ffi::AnyBuffer& dblocks, bool tf32,
                      SddmmArgs* args) {
  const char* op = "bsjax_sddmm";
  BSJAX_RETURN_IF_ERROR(ToDType(op, x.element_type(), &args->dtype));
  if (dy.element_type() != x.element_type() || dblocks.element_type() != x.element_type()) {
    return Refuse(op, "x, dy and dblocks must have one dtype");
  }
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "rows", rows));
  BSJAX_RETURN_IF_ERROR(CheckIndices(op, "cols", cols));
  const Dims xd = x.dimensions(), yd = dy.dimensions(), wd = dblocks.dimensions();
  if (xd.size() < 2 || yd.size() < 2 || wd.size() != 4) {
    return Refuse(op, "x and dy must be [g, ..., features] and dblocks must have 4 dimensions; got " + Show(xd) + ", " +
                          Show(yd) + " and " + Show(wd));
  }
  const int64_t k = xd[xd.size() - 1], n = yd[yd.size() - 1], m = Product(xd, 1, xd.size() - 1);
  const int64_t b = wd[3];
  if (wd[2] != b || !Serves(b)) {
    return Refuse(op, "dblocks must be square with side 8, 16, 32, 64 or 128; got " + Show(wd));
  }
  int64_t groups = 1;
  if (!JoinGroups(xd[0], &groups) || !JoinGroups(yd[0], &groups) || wd[0] != groups) {
    return Refuse(op,
                  "the groups of x, dy and dblocks must agree; got " + Show(xd) + ", " + Show(yd) + " and " + Show(wd));
  }
  if (!SameRows(xd, yd) || k % b != 0 || n % b != 0) {
    return Refuse(op, "x " + Show(xd) + " and dy " + Show(yd) + " do not fit blocks of side " + std::to_string(b));
  }
  if (static_cast<int64_t>(rows.element_count()) != wd[1] || static_cast<int64_t>(cols.element_count()) != wd[1]) {
    return Refuse(op, "rows and cols must have one entry a block of " + Show(wd));
  }
  args->x = x.untyped_data();
  args->dy = dy.untyped_data();
  args->rows = static_cast<const int32_t*>(rows.untyped_data());
  args->cols = static_cast<const int32_t*>(cols.untyped_data());
  bool has_schedule = false;
  const int64_t max_bins = SddmmMaxBins(k, n, static_cast<int>(b), wd[1]);
  BSJAX_RETURN_IF_ERROR(CheckSchedule(op, schedule, max_bins * SddmmBin{static_cast<int>(b)}.Words(), &has_schedule));
  args->seal = static_cast<const int32_t*>(schedule.untyped_data());
  args->bins = has_schedule ? args->seal + kScheduleHeaderWords : nullptr;
  args->max_bins = has_schedule ? max_bins : 0;
  args->dblocks = dblocks.untyped_data();
  args->num_groups = groups;
  args->m = m;
  args->k = k;
  args->n = n;
  args->x_group_stride = xd[0] == 1 ? 0 : m * k;
  args->dy_group_stride = yd[0] == 1 ? 0 : m * n;
  args->num_blocks = wd[1];
  args->block_size = static_cast<int32_t>(b);
  args->tf32 = tf32;
  return ffi::Error::Success();
}

ffi::Error CheckSeal(const char* op, const int32_t* seal) {
  if (*seal == kSeal) return ffi::Error::Success();
  return Refuse(
      op,
      "the layout's arrays were changed (its seal is broken), by arithmetic on a whole training state perhaps: "
      "map over nnx.Param only, or leave integer leaves alone");
}

}  // namespace bsjax
