// The plans worth having: for every budget the one of least time, and of those the one of least
// peak.
//
// Dynamic programming over the stages. A label is a beginning of a plan, by its time, its peak so
// far, what it holds (timeline.h) and what it has offloaded; labels that another one is at least as
// good as in all of these are dropped. Since the peak is among them, one pass gives the plans of
// all budgets, and the peak and the time of a budget's plan are monotone in the budget.
//
// A peak so far is raised to what the label will reach whatever comes: where the stages are alike
// that makes it a function of what is held, and as good as no dimension at all.
//
// Where more than twice `most_labels` are left at a stage, those that share a cell of a grid (of
// all bytes) are merged: the one of least time stands for all. Nothing is rounded: what is said of
// a plan is exact. But it is the best only up to the grid. With e = 2 x stages x grid, no plan
// whose peak is lower by 3 e is faster by more than e / out + e / back; and the room may be used up
// to e less. From then on at most `most_labels` are left; the floor is searched for by itself.
#pragma once

#include <cstddef>
#include <vector>

#include "timeline.h"

namespace memopt::plan {

constexpr size_t kMostLabels = 6000;

struct Plan {
  std::vector<size_t> choices;
  Bytes peak = 0;
  Ticks ticks = 0;
};

struct Front {
  std::vector<Plan> plans;  // from the least peak to the least time
  Bytes grid = 0;           // 0: exact
  Bytes floor_grid = 0;     // 0: no plan has a peak less than the first one's
  size_t most_labels = 0;   // that were left at a stage

  // The fastest plan within the budget; null: the budget is below the floor.
  const Plan* at(Bytes budget) const;
};

Front find_front(const Chain& chain, size_t most_labels = kMostLabels);

}  // namespace memopt::plan
