/* Continue tokens by an exported folder, from C: continue FOLDER COUNT TOKEN... */
#include <stdio.h>
#include <stdlib.h>

#include "liteboost_run.h"

int main(int count, char** words) {
  liteboost_model* model = NULL;
  int64_t ids[1024];
  size_t given = 0;
  if (count < 4 || count > 1024) {
    fprintf(stderr, "usage: %s FOLDER COUNT TOKEN...\n", words[0]);
    return 2;
  }
  for (int at = 3; at < count; ++at) ids[given++] = atoll(words[at]);

  int status = liteboost_open(words[1], NULL, &model);
  if (!status) status = liteboost_prefill(model, ids, given);
  for (int left = atoi(words[2]); left > 0 && !status; --left) {
    int64_t id = 0;
    int stops = 0;
    status = liteboost_next(model, &id, &stops);
    if (!status) printf("%lld ", (long long)id);
    if (stops) break;
  }
  printf("\n");
  if (status) fprintf(stderr, "error: %s\n", liteboost_error());
  liteboost_close(model);
  return status;
}
