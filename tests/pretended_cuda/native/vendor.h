// For the libraries of which only a few functions have to do more than to succeed.
#pragma once
#include <stdlib.h>

// A handle, a descriptor, a plan: memory that nobody looks into.
#define CREATES(name)       \
  int name(void** made) {   \
    *made = calloc(1, 64);  \
    return 0;               \
  }

#define TELLS(name) \
  const char* name(int error) { return error ? "an error of the pretended library" : "success"; }
