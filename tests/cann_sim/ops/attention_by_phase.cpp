// PromptFlashAttention and IncreFlashAttention: inference attention of several query rows and of one, apart.
#include "attention.h"

using namespace sim;

OP(aclnnPromptFlashAttentionV3, PFA_ARGUMENTS) {
  PFA_COLLECT();
  infer(a);
}
OP(aclnnIncreFlashAttentionV4, IFA_ARGUMENTS) {
  IFA_COLLECT();
  infer(a);
}
