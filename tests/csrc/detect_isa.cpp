// Prints the best instruction set that this CPU is found to have.
#include <cstdio>

#include "common/isa.h"

int main() {
#define LB_NAME(isa, ...) #isa,
  constexpr const char* names[] = {LB_EACH_ISA(LB_NAME)};
  printf("%s\n", names[static_cast<int>(liteboost::detect_isa())]);
}
