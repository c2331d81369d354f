// How a CPU handler runs: which kernels this processor takes, and how tasks spread over XLA's thread pool.
#ifndef BSJAX_CUDA_CPU_TASKS_H_
#define BSJAX_CUDA_CPU_TASKS_H_

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "cuda/cpu/kernels.h"
#include "xla/ffi/api/ffi.h"

namespace bsjax {

// The kernels of the widest vectors that this processor has; asked once.
inline const CpuKernels& ChooseCpuKernels() {
  static const CpuKernels& kernels = []() -> const CpuKernels& {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        return kCpuKernelsAvx512;
      }
      return kCpuKernelsAvx2;
    }
#endif
    return kCpuKernelsGeneric;
  }();
  return kernels;
}

// Below this many multiply-adds (some 5 us of one core) waking another thread costs more than it saves.
constexpr int64_t kMinTaskWork = int64_t{1} << 19;

// The number of tasks that `work` multiply-adds deserve, so many a thread at most; 1 runs in the caller.
inline int64_t NumTasks(xla::ffi::ThreadPool& pool, int64_t work, int64_t tasks_per_thread) {
  return std::clamp<int64_t>(work / kMinTaskWork, 1, std::max<int64_t>(1, tasks_per_thread * pool.num_threads()));
}

// Calls run(task) for each task in [0, num_tasks), and returns when all are done. The caller works too and never waits
// for a thread that has not begun: a full pool, or a pool of one, only makes it slower.
template <typename Run>
void RunTasks(xla::ffi::ThreadPool& pool, int64_t num_tasks, Run run) {
  if (num_tasks <= 1) {
    if (num_tasks == 1) run(0);
    return;
  }
  struct State {
    Run run;
    const int64_t num_tasks;
    std::fenv_t environment;  // XLA's choice for denormals; the same in every thread, so that the bits are too
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> num_done{0};
    std::mutex mutex;
    std::condition_variable all_done;

    State(Run run, int64_t num_tasks) : run(std::move(run)), num_tasks(num_tasks) { std::fegetenv(&environment); }

    void Drain() {
      for (int64_t task; (task = next.fetch_add(1)) < num_tasks;) {
        run(task);
        if (num_done.fetch_add(1) + 1 == num_tasks) {
          std::lock_guard<std::mutex> lock(mutex);
          all_done.notify_all();
        }
      }
    }
  };
  // Shared, since a thread may come to its turn after the last task is done and this call has returned.
  auto state = std::make_shared<State>(std::move(run), num_tasks);
  const int64_t num_others = std::min<int64_t>(pool.num_threads(), num_tasks) - 1;
  for (int64_t i = 0; i < num_others; ++i) {
    pool.Schedule([state] {
      std::fenv_t own;
      std::fegetenv(&own);
      std::fesetenv(&state->environment);
      state->Drain();
      std::fesetenv(&own);
    });
  }
  state->Drain();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->num_done.load() == num_tasks; });
}

}  // namespace bsjax

#endif  // BSJAX_CUDA_CPU_TASKS_H_
