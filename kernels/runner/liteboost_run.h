/* Text from a folder that `python -m liteboost_adaptor export` has written, without Python.
 *
 *   liteboost_model* model;
 *   if (liteboost_open("folder", NULL, &model)) return fail(liteboost_error());
 *   liteboost_prefill(model, ids, count);
 *   while (!liteboost_next(model, &id, &stops) && !stops) ...
 *   liteboost_close(model);
 *
 * A model holds one sequence, and is used by one thread at a time; several models may be open. Functions that can fail
 * give 0, or what kind of failure it was; liteboost_error() says it in words: what was asked, what was found, what to
 * do. Nothing is printed, and nothing throws.
 */
#ifndef LITEBOOST_RUN_H
#define LITEBOOST_RUN_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LITEBOOST_API __attribute__((visibility("default")))

typedef struct liteboost_model liteboost_model;

enum liteboost_status {
  LITEBOOST_OK = 0,
  LITEBOOST_BAD_FOLDER = 1,   /* a file is missing, damaged, or says what cannot be; the message names it */
  LITEBOOST_BAD_LIBRARY = 2,  /* the kernels cannot be loaded, or are others than the folder was made with */
  LITEBOOST_BAD_ARGUMENT = 3, /* what was given is not allowed */
  LITEBOOST_FULL = 4,         /* the sequence is as long as the folder allows: liteboost_reset() */
  LITEBOOST_FAILED = 5        /* a run has failed: liteboost_reset() */
};

typedef struct liteboost_options {
  int threads;           /* 0: as many as there are cores; at most 4096 */
  int without_checksums; /* 1: do not read all weights to compare them with their checksum */
  const char* kernels;   /* path of _C.so; NULL: beside this library */
  const char*
      tokenizer; /* path of onnxruntime-extensions' library; NULL: libortextensions.so, beside this library or
                            where the system looks. Loaded when a text is first given */
} liteboost_options;

typedef struct liteboost_sampling {
  int sample;         /* 0: the most likely token, always */
  double temperature; /* above 0; 1: as the model says */
  int64_t top_k;      /* draw from so many; 0: from all */
  double top_p;       /* draw from the most likely ones that have this probability together; 1: from all */
  double repetition_penalty; /* above 0; 1: none */
  uint64_t seed;
} liteboost_sampling;

/* Opens a folder. `options` may be NULL. */
LITEBOOST_API int liteboost_open(const char* folder, const liteboost_options* options,
                                 liteboost_model** model);

/* Closes it; NULL is nothing. */
LITEBOOST_API void liteboost_close(liteboost_model* model);

/* Forgets the sequence; settings of sampling stay, and draws begin anew from their seed. */
LITEBOOST_API int liteboost_reset(liteboost_model* model);

/* Reads `count` tokens: a prompt, or what follows what was read and generated. */
LITEBOOST_API int liteboost_prefill(liteboost_model* model, const int64_t* ids, size_t count);

/* The next token, and whether it is one of those that end a text. It is read when the next one is asked for. */
LITEBOOST_API int liteboost_next(liteboost_model* model, int64_t* id, int* stops);

/* How liteboost_next chooses; `settings` receives how it does now, which the folder says at first. */
LITEBOOST_API int liteboost_sample(liteboost_model* model, const liteboost_sampling* settings);
LITEBOOST_API int liteboost_sampling_of(const liteboost_model* model, liteboost_sampling* settings);

/* The logits of the last token that was read: `vocabulary` numbers that stay until the next call. */
LITEBOOST_API int liteboost_logits(liteboost_model* model, const float** logits, size_t* vocabulary);

/* How many tokens were read, and how many a sequence may have. */
LITEBOOST_API int liteboost_length(const liteboost_model* model, size_t* length, size_t* longest);

/* Text to tokens, with those that begin or end every text, and back, without tokens that stand for none. `chat`: what the
 * folder's chat template makes of messages, as tokens; they are JSON: [{"role": "user", "content": "..."}]. What is given
 * stays until the next call of these. */
LITEBOOST_API int liteboost_tokenize(liteboost_model* model, const char* text, const int64_t** ids,
                                     size_t* count);
LITEBOOST_API int liteboost_chat(liteboost_model* model, const char* messages, const int64_t** ids,
                                 size_t* count);
LITEBOOST_API int liteboost_text(liteboost_model* model, const int64_t* ids, size_t count, const char** text);

/* What the last failure in this thread was; an empty text before the first one. */
LITEBOOST_API const char* liteboost_error(void);

#ifdef __cplusplus
}
#endif

#endif
