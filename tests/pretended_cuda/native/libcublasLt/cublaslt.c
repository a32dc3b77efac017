#include "vendor.h"

CREATES(cublasLtCreate)
CREATES(cublasLtMatmulDescCreate)
CREATES(cublasLtMatmulPreferenceCreate)
CREATES(cublasLtMatrixLayoutCreate)

size_t cublasLtGetVersion(void) { return 130000; }

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* product, void* a, void* b, void* c, void* d, void* preference,
                                   int asked, void* results, int* found) {
  *found = 1;
  return 0;
}
