package tunnel

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
)

// maxSniff is how many bytes the protocols may look at to know their own.
const maxSniff = 64

// detect asks the protocols of the listener whose connection k is.
func (k *slot) detect() (Protocol, error) {
	ps := k.config.Protocols
	if len(ps) > 1 && hasFirstSpeaker(ps) {
		defer k.settle()
		k.headerOnly.Store(k.config.ConnHeader != nil && len(k.buf) == 0)
		return detect(&k.Conn, k, ps)
	}
	return detect(&k.Conn, nil, ps)
}

// detect asks the protocols whose connection c is, as its first bytes come. k is its slot
// where one of them may speak first, and otherwise nil.
func detect(c *Conn, k *slot, protocols []Protocol) (Protocol, error) {
	if len(protocols) == 1 {
		return protocols[0], nil
	}
	for {
		if len(c.Buffered()) > 0 {
			p, decided := sniff(protocols, c.Buffered())
			if p != nil {
				return p, nil
			}
			if decided {
				prefix := c.Buffered()
				err := unknownPreamble(c.Listener, prefix)
				if isSOCKS5(prefix) {
					// Its clients know how to be told no: none of their methods
					// will do. An empty socket takes this much without waiting.
					_, _ = c.Write([]byte{5, 0xff})
					return nil, err
				}
				_ = c.Abort()
				return nil, err
			}
		}
		if err := c.Fill(maxSniff << 8); err != nil {
			if k != nil && errors.Is(err, os.ErrDeadlineExceeded) && k.settle() {
				if p := firstSpeaker(protocols, math.MaxInt64); len(c.Buffered()) == 0 {
					return p, nil
				}
				continue // it has sent something at the last moment
			}
			_ = c.Abort()
			return nil, PreambleError(c, err)
		}
	}
}

// PreambleError returns the error, with its Reason, of a connection whose preamble could
// not be read because of err: NoHello where the client left without a byte, Gone where
// it left later, HelloTimeout where its time was up. Protocols use it for the errors of
// Fill.
func PreambleError(c *Conn, err error) *Error {
	return PreambleErrorAfter(int64(len(c.Buffered())), err)
}

// PreambleErrorAfter is PreambleError for a connection of which n bytes were read.
func PreambleErrorAfter(n int64, err error) *Error {
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return Refusef(HelloTimeout, "the preamble was not complete in time: %d bytes came", n)
	case n == 0:
		return &Error{Reason: NoHello, Err: fmt.Errorf("the client left without a byte: %w", err)}
	case errors.Is(err, io.EOF):
		return Refusef(Gone, "the client left after %d bytes of its preamble", n)
	}
	return &Error{Reason: Gone, Err: fmt.Errorf("the client left after %d bytes of its preamble: %w", n, err)}
}
