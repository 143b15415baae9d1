// Prints the best instruction set compiled that this CPU is found to have.
#include <cstdio>

#include "common/isa.h"

int main() {
  const char* best = "";
#define LB_BEST(isa, ...) \
  if (liteboost::Isa::isa <= liteboost::detect_isa()) best = #isa;
  LB_EACH_ISA(LB_BEST)
  printf("%s\n", best);
}
