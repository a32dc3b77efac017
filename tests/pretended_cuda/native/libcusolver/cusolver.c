#include "vendor.h"

CREATES(cusolverDnCreate)
