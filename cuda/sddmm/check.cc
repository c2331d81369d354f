#include "cuda/sddmm/check.h"

#include "cuda/sddmm/schedule.h"
#include "cuda/seal.h"

namespace bsjax {

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

}  // namespace bsjax
