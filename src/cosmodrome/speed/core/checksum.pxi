# Part of native.pyx: the checksum of bodies.

# CRC-32 as zlib computes it, several times faster: 64 bytes per round by carry-less products
# where the processor has them (Gopal et al., "Fast CRC Computation Using PCLMULQDQ", 2009),
# else eight bytes per round by tables.
cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>
    #if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
    #define CRC_FOLDS 1
    #include <immintrin.h>
    #endif

    static uint32_t crc_table[8][256];
    static int crc_folds = 0;

    static void crc_prepare(void) {
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t value = byte;
            for (int bit = 0; bit < 8; bit++)
                value = value & 1 ? 0xEDB88320u ^ (value >> 1) : value >> 1;
            crc_table[0][byte] = value;
        }
        for (int row = 1; row < 8; row++)
            for (int byte = 0; byte < 256; byte++) {
                uint32_t value = crc_table[row - 1][byte];
                crc_table[row][byte] = crc_table[0][value & 0xFF] ^ (value >> 8);
            }
    #ifdef CRC_FOLDS
        __builtin_cpu_init();
        crc_folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    #endif
    }

    #ifdef CRC_FOLDS
    #define CRC_FOLD(x, k, next) _mm_xor_si128(_mm_xor_si128( \\
        _mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), next)
    #define CRC_LOAD(at) _mm_loadu_si128((const __m128i *)(at))

    /* `size` is a multiple of 16 and at least 64; the constants are powers of x mod P. */
    __attribute__((target("pclmul,sse4.1")))
    static uint32_t crc_fold(uint32_t crc, const uint8_t *at, size_t size) {
        const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
        const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
        const __m128i by_64 = _mm_set_epi64x(0, 0x163cd6124);
        const __m128i barrett = _mm_set_epi64x(0x1f7011641, 0x1db710641);
        const __m128i low = _mm_setr_epi32(-1, 0, -1, 0);
        __m128i a = _mm_xor_si128(CRC_LOAD(at), _mm_cvtsi32_si128((int)crc));
        __m128i b = CRC_LOAD(at + 16), c = CRC_LOAD(at + 32), d = CRC_LOAD(at + 48), t;
        for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
            a = CRC_FOLD(a, by_512, CRC_LOAD(at));
            b = CRC_FOLD(b, by_512, CRC_LOAD(at + 16));
            c = CRC_FOLD(c, by_512, CRC_LOAD(at + 32));
            d = CRC_FOLD(d, by_512, CRC_LOAD(at + 48));
        }
        a = CRC_FOLD(a, by_128, b);
        a = CRC_FOLD(a, by_128, c);
        a = CRC_FOLD(a, by_128, d);
        for (; size >= 16; at += 16, size -= 16)
            a = CRC_FOLD(a, by_128, CRC_LOAD(at));
        t = _mm_clmulepi64_si128(a, by_128, 0x10);
        a = _mm_xor_si128(_mm_srli_si128(a, 8), t);
        t = _mm_srli_si128(a, 4);
        a = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(a, low), by_64, 0x00), t);
        t = _mm_clmulepi64_si128(_mm_and_si128(a, low), barrett, 0x10);
        t = _mm_clmulepi64_si128(_mm_and_si128(t, low), barrett, 0x00);
        return (uint32_t)_mm_extract_epi32(_mm_xor_si128(a, t), 1);
    }
    #endif

    static uint32_t crc_of(const uint8_t *at, size_t size) {
        uint32_t crc = 0xFFFFFFFFu;
    #ifdef CRC_FOLDS
        if (crc_folds && size >= 64) {
            size_t whole = size & ~(size_t)15;
            crc = crc_fold(crc, at, whole);
            at += whole;
            size -= whole;
        }
    #endif
        for (; size >= 8; at += 8, size -= 8) {
            crc ^= (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16
                | (uint32_t)at[3] << 24;
            crc = crc_table[7][crc & 0xFF] ^ crc_table[6][(crc >> 8) & 0xFF]
                ^ crc_table[5][(crc >> 16) & 0xFF] ^ crc_table[4][crc >> 24]
                ^ crc_table[3][at[4]] ^ crc_table[2][at[5]] ^ crc_table[1][at[6]]
                ^ crc_table[0][at[7]];
        }
        for (; size; at++, size--)
            crc = crc_table[0][(crc ^ *at) & 0xFF] ^ (crc >> 8);
        return ~crc;
    }
    """
    void crc_prepare() noexcept nogil
    uint32_t crc_of(const uint8_t *at, size_t size) noexcept nogil

crc_prepare()
