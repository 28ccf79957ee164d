/* Gives tritonserver further arguments that no process list shows.
 *
 * Triton takes the keys of its restricted parts on its command line and nowhere else, and everybody on a machine may read that.
 * So this stands before it (LD_PRELOAD): it takes them from an environment variable, a line each, wipes that, and calls main with
 * them behind the others. What the kernel shows as the command line is what the process was started with.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define PROGRAM "tritonserver"
#define VARIABLE "LOOKAHEAD_SERVER_ARGUMENTS"
#define PRELOAD "LD_PRELOAD"

typedef int Main(int, char **, char **);
typedef int Start(Main *, int, char **, void (*)(void), void (*)(void), void (*)(void), void *);

static int is_program(const char *path) {
    const char *slash = strrchr(path, '/');
    return !strcmp(slash ? slash + 1 : path, PROGRAM);
}

/* What is started from here, models above all, is neither told nor preceded by this. */
static void forget(char *told) {
    memset(told, 0, strlen(told)); /* the kernel shows these bytes as the environment */
    unsetenv(VARIABLE);
    const char *preload = getenv(PRELOAD), *others = preload ? strchr(preload, ':') : NULL;
    if (others) setenv(PRELOAD, others + 1, 1);
    else unsetenv(PRELOAD);
}

int __libc_start_main(Main *main, int argc, char **argv, void (*init)(void), void (*fini)(void), void (*rtld_fini)(void), void *end) {
    Start *start = (Start *)dlsym(RTLD_NEXT, "__libc_start_main");
    char *told = getenv(VARIABLE);
    if (argc < 1 || !told || !is_program(argv[0])) return start(main, argc, argv, init, fini, rtld_fini, end);
    size_t most = (size_t)argc + 2;
    for (const char *c = told; *c; c++) most += *c == '\n';
    char *lines = strdup(told), *rest = NULL;
    char **words = malloc(most * sizeof *words);
    if (!lines || !words) abort();
    memcpy(words, argv, (size_t)argc * sizeof *words);
    int count = argc;
    for (char *line = strtok_r(lines, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) words[count++] = line;
    words[count] = NULL;
    forget(told);
    return start(main, count, words, init, fini, rtld_fini, end);
}
