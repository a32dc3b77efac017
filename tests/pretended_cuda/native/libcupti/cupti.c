#include "vendor.h"

int cuptiGetVersion(unsigned* version) {
  *version = 130000;
  return 0;
}

int cuptiGetResultString(int error, const char** text) {
  *text = "an error of the pretended profiler";
  return 0;
}
