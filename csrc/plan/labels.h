// Beginnings of plans, and the rule by which some of them are dropped.
#pragma once

#include <cstdint>
#include <vector>

#include "timeline.h"

namespace memopt::plan {

// Choices for the first stages, by what they cost.
struct Label {
  Ticks ticks = 0;
  Bytes peak = 0;
  Held held;
  Bytes offloaded = 0;  // in all
  uint32_t before = 0;  // the label of the stage before that this one extends
  uint32_t choice = 0;
};

// Drops every label that another one is at least as good as in all of ticks, peak, held and
// offloaded, and sorts the others by these.
//
// With a grid > 0, a power of two, also every label that shares a cell of the grid (of the bytes)
// with one that takes no more ticks. What is dropped so has at most `grid` bytes less of anything.
void drop_dominated(std::vector<Label>& labels, Bytes grid);

}  // namespace memopt::plan
