// The place of a sequence that is a part of a longer sequence, as tandem_place of tandem.h has it.
#pragma once

// Row i is query first_query + i * stride of the document, and key j is key first_key + j * stride.
struct Place {
  int document, first_query, first_key, stride;
  int seqlen_q, seqlen_k, diagonal;  // the document's
  int first_head, heads_q;           // the call's first query head, and the number of all
};
