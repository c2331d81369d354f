// EXPECT for the tests on the host: says what is wrong and goes on.
#ifndef BSJAX_CUDA_EXPECT_H_
#define BSJAX_CUDA_EXPECT_H_

#include <cstdio>

namespace bsjax {

inline int failures = 0;

// The words after the condition are those of printf.
#define EXPECT(condition, ...)                                    \
  do {                                                            \
    if (!(condition)) {                                           \
      ++bsjax::failures;                                          \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
    }                                                             \
  } while (false)

}  // namespace bsjax

#endif  // BSJAX_CUDA_EXPECT_H_
