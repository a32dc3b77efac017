#include "vendor.h"

CREATES(cusparseCreate)
TELLS(cusparseGetErrorString)
