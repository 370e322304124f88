# Part of native.pyx: SHA-1 (FIPS 180-4) and HMAC (RFC 2104) from a prepared key (the twin uses hashlib).
#
# The library behind `hashlib` takes longer to get ready than to hash the few blocks of a small message
# (bench/RESULTS.md). Here a key is two states, made once: of the block that goes before the message,
# and of the one before its digest. Processors that know SHA-1 do the rounds themselves.

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>
    #if defined(__GNUC__) && defined(__x86_64__)
    #include <cpuid.h>
    #include <immintrin.h>
    #define SHA1_OF_PROCESSOR 1
    #endif

    enum { SHA1_BLOCK = 64, SHA1_DIGEST = 20 };

    static inline uint32_t sha1_word(const uint8_t *at) {
        return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
    }

    static inline uint32_t sha1_turn(uint32_t word, int bits) {
        return word << bits | word >> (32 - bits);
    }

    /* One round; the next one calls its words by the names of their neighbours. A word that was
       used makes room for the one sixteen rounds later. */
    #define SHA1_ROUND(a, b, c, d, e, t, mixed, more)                                          \\
        do {                                                                                   \\
            if ((t) > 15)                                                                      \\
                w[(t) & 15] = sha1_turn(                                                       \\
                    w[((t) + 13) & 15] ^ w[((t) + 8) & 15] ^ w[((t) + 2) & 15] ^ w[(t) & 15], 1\\
                );                                                                             \\
            e += sha1_turn(a, 5) + (mixed) + more + w[(t) & 15];                               \\
            b = sha1_turn(b, 30);                                                              \\
        } while (0)
    #define SHA1_CHOICE(b, c, d) ((d) ^ ((b) & ((c) ^ (d))))
    #define SHA1_PARITY(b, c, d) ((b) ^ (c) ^ (d))
    #define SHA1_MAJORITY(b, c, d) (((b) & (c)) | ((d) & ((b) | (c))))
    #define SHA1_FIVE(t, mix, more)                                                            \\
        SHA1_ROUND(a, b, c, d, e, t, mix(b, c, d), more);                                      \\
        SHA1_ROUND(e, a, b, c, d, t + 1, mix(a, b, c), more);                                  \\
        SHA1_ROUND(d, e, a, b, c, t + 2, mix(e, a, b), more);                                  \\
        SHA1_ROUND(c, d, e, a, b, t + 3, mix(d, e, a), more);                                  \\
        SHA1_ROUND(b, c, d, e, a, t + 4, mix(c, d, e), more)

    static void sha1_plain(uint32_t state[5], const uint8_t *at, size_t blocks) {
        for (; blocks; blocks--, at += SHA1_BLOCK) {
            uint32_t w[16];
            uint32_t a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
            for (int t = 0; t < 16; t++)
                w[t] = sha1_word(at + 4 * t);
            for (int t = 0; t < 20; t += 5) {
                SHA1_FIVE(t, SHA1_CHOICE, 0x5A827999u);
            }
            for (int t = 20; t < 40; t += 5) {
                SHA1_FIVE(t, SHA1_PARITY, 0x6ED9EBA1u);
            }
            for (int t = 40; t < 60; t += 5) {
                SHA1_FIVE(t, SHA1_MAJORITY, 0x8F1BBCDCu);
            }
            for (int t = 60; t < 80; t += 5) {
                SHA1_FIVE(t, SHA1_PARITY, 0xCA62C1D6u);
            }
            state[0] += a;
            state[1] += b;
            state[2] += c;
            state[3] += d;
            state[4] += e;
        }
    }

    #ifdef SHA1_OF_PROCESSOR
    /* Four rounds: the words for them (made of the last sixteen), what e becomes, and the rest.
       `kind` is which function and constant they use. */
    #define SHA1_FOUR(turn, kind)                                                              \\
        do {                                                                                   \\
            __m128i *now = &w[(turn) & 3], *last = &w[((turn) + 3) & 3];                       \\
            if ((turn) > 3) {                                                                  \\
                *now = _mm_sha1msg1_epu32(*now, w[((turn) + 1) & 3]);                          \\
                *now = _mm_sha1msg2_epu32(_mm_xor_si128(*now, w[((turn) + 2) & 3]), *last);    \\
            }                                                                                  \\
            e = (turn) ? _mm_sha1nexte_epu32(before, *now) : _mm_add_epi32(e, *now);           \\
            before = abcd;                                                                     \\
            abcd = _mm_sha1rnds4_epu32(abcd, e, kind);                                         \\
        } while (0)
    #define SHA1_TWENTY(turn, kind)                                                            \\
        SHA1_FOUR(turn, kind);                                                                 \\
        SHA1_FOUR(turn + 1, kind);                                                             \\
        SHA1_FOUR(turn + 2, kind);                                                             \\
        SHA1_FOUR(turn + 3, kind);                                                             \\
        SHA1_FOUR(turn + 4, kind)

    __attribute__((target("sha,ssse3,sse4.1")))
    static void sha1_fast(uint32_t state[5], const uint8_t *at, size_t blocks) {
        const __m128i reverse = _mm_set_epi64x(0x0001020304050607LL, 0x08090A0B0C0D0E0FLL);
        __m128i abcd = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0x1B);
        __m128i e = _mm_set_epi32((int)state[4], 0, 0, 0), before = e, w[4];
        for (; blocks; blocks--, at += SHA1_BLOCK) {
            const __m128i abcd_was = abcd, e_was = e;
            for (int part = 0; part < 4; part++)
                w[part] = _mm_shuffle_epi8(
                    _mm_loadu_si128((const __m128i *)(at + 16 * part)), reverse
                );
            SHA1_TWENTY(0, 0);
            SHA1_TWENTY(5, 1);
            SHA1_TWENTY(10, 2);
            SHA1_TWENTY(15, 3);
            e = _mm_sha1nexte_epu32(before, e_was);
            abcd = _mm_add_epi32(abcd, abcd_was);
        }
        _mm_storeu_si128((__m128i *)state, _mm_shuffle_epi32(abcd, 0x1B));
        state[4] = (uint32_t)_mm_extract_epi32(e, 3);
    }

    static int sha1_is_known(void) {
        unsigned a = 0, b = 0, c = 0, d = 0;
        if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1))
            return 0;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1;
    }
    #endif

    static void (*sha1_blocks)(uint32_t state[5], const uint8_t *at, size_t blocks) = sha1_plain;

    /* From now on with the rounds of the processor, if it has them and `plain` is not wanted. */
    static void sha1_choose(int plain) {
        sha1_blocks = sha1_plain;
    #ifdef SHA1_OF_PROCESSOR
        static int known = -1;  /* asking takes long in a virtual machine */
        if (known < 0)
            known = sha1_is_known();
        if (known && !plain)
            sha1_blocks = sha1_fast;
    #endif
    }

    typedef struct {
        uint32_t inner[5], outer[5];
    } HmacKey;

    static void sha1_begin(uint32_t state[5]) {
        const uint32_t first[5] = {
            0x67452301u, 0xEFCDAB89u, 0x98BADCFEu, 0x10325476u, 0xC3D2E1F0u
        };
        memcpy(state, first, sizeof first);
    }

    /* The rest of a message of `total` bytes, which is less than a block, and the digest. */
    static void sha1_end(
        uint32_t state[5], uint8_t rest[2 * SHA1_BLOCK], size_t size, uint64_t total, uint8_t *out
    ) {
        size_t blocks = size < SHA1_BLOCK - 8 ? 1 : 2;
        uint8_t *end = rest + blocks * SHA1_BLOCK;
        memset(rest + size, 0, blocks * SHA1_BLOCK - size);
        rest[size] = 0x80;
        total *= 8;  /* in bits */
        for (int index = 1; index <= 8; index++, total >>= 8)
            end[-index] = (uint8_t)total;
        sha1_blocks(state, rest, blocks);
        for (int index = 0; index < SHA1_DIGEST; index++)
            out[index] = (uint8_t)(state[index >> 2] >> (24 - 8 * (index & 3)));
    }

    /* `block` is the secret, or its digest if it is longer than a block, and zeros. */
    static void hmac_prepare(HmacKey *key, const uint8_t block[SHA1_BLOCK]) {
        uint8_t padded[SHA1_BLOCK];
        sha1_begin(key->inner);
        sha1_begin(key->outer);
        for (int index = 0; index < SHA1_BLOCK; index++)
            padded[index] = block[index] ^ 0x36;
        sha1_blocks(key->inner, padded, 1);
        for (int index = 0; index < SHA1_BLOCK; index++)
            padded[index] = block[index] ^ 0x5C;
        sha1_blocks(key->outer, padded, 1);
    }

    /* Of a message in two parts. */
    static void hmac_digest(
        const HmacKey *key, const uint8_t *first, size_t first_size, const uint8_t *second,
        size_t second_size, uint8_t out[SHA1_DIGEST]
    ) {
        uint32_t state[5];
        uint8_t rest[2 * SHA1_BLOCK];
        uint64_t total = SHA1_BLOCK + (uint64_t)first_size + second_size;
        size_t whole = first_size / SHA1_BLOCK, size = first_size % SHA1_BLOCK;
        memcpy(state, key->inner, sizeof state);
        sha1_blocks(state, first, whole);
        memcpy(rest, first + whole * SHA1_BLOCK, size);
        if (size + second_size >= SHA1_BLOCK) {
            memcpy(rest + size, second, SHA1_BLOCK - size);
            second += SHA1_BLOCK - size;
            second_size -= SHA1_BLOCK - size;
            sha1_blocks(state, rest, 1);
            whole = second_size / SHA1_BLOCK;
            sha1_blocks(state, second, whole);
            second += whole * SHA1_BLOCK;
            second_size -= whole * SHA1_BLOCK;
            size = 0;
        }
        memcpy(rest + size, second, second_size);
        sha1_end(state, rest, size + second_size, total, out);
        memcpy(rest, out, SHA1_DIGEST);
        memcpy(state, key->outer, sizeof state);
        sha1_end(state, rest, SHA1_DIGEST, SHA1_BLOCK + SHA1_DIGEST, out);
    }
    """
    enum:
        SHA1_BLOCK
        SHA1_DIGEST
    ctypedef struct HmacKey:
        pass
    void sha1_choose(int plain) noexcept nogil
    void hmac_prepare(HmacKey *key, const uint8_t *block) noexcept nogil
    void hmac_digest(
        const HmacKey *key, const uint8_t *first, size_t first_size, const uint8_t *second,
        size_t second_size, uint8_t *out
    ) noexcept nogil
