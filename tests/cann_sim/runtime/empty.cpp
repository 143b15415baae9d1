// Libraries that torch_npu names as needed and takes nothing from.
extern "C" int simcann_empty_library(void) { return 1; }
