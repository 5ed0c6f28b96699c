package connect

import (
	"bufio"
	"errors"
	"io"
	"strconv"
	"strings"

	"culvert.dev/tunnel"
)

// maxChunkLine is how many bytes the line before a chunk may have: its size, and extensions,
// which do not reach the service.
const maxChunkLine = 256

// A chunkReader reads content in chunks, RFC 9112 section 7.1, and writes the lines between them
// itself, so that a service reads the same chunks out of it, however lenient it is. A trailer
// section is an error: what is in it could be taken for fields of the head. Nothing but the line
// of a chunk is kept.
type chunkReader struct {
	from *bufio.Reader
	text []byte // to be read before all else
	left uint64 // bytes of the chunk
	data bool   // the chunk is not over
	over bool   // the last chunk was read
}

func newChunkReader(r io.Reader) *chunkReader {
	return &chunkReader{from: bufio.NewReaderSize(r, 4096)}
}

// read is Read of an io.Reader. At the end of the content it drops what follows until the end of
// the stream, which it returns.
func (c *chunkReader) read(p []byte) (n int, err error) {
	for len(c.text) == 0 {
		switch {
		case c.over:
			for {
				if _, err := c.from.Read(p); err != nil {
					return 0, err
				}
			}
		case c.left > 0:
			n, err = c.from.Read(p[:min(uint64(len(p)), c.left)])
			c.left -= uint64(n)
			return n, cutShort(err)
		case c.data:
			err = c.endChunk()
		default:
			err = c.beginChunk()
		}
		if err != nil {
			return 0, cutShort(err)
		}
	}
	n = copy(p, c.text)
	c.text = c.text[n:]
	return n, nil
}

// cutShort is the error of a stream that ends within the content.
func cutShort(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// beginChunk reads the line before a chunk, and what follows the last one.
func (c *chunkReader) beginChunk() error {
	line, err := c.line()
	if err != nil {
		return err
	}
	size, _, _ := strings.Cut(line, ";")
	size = strings.TrimRight(size, " \t") // RFC 9112 section 7.1.1
	if c.left, err = strconv.ParseUint(size, 16, 63); err != nil || strings.Trim(size, "0123456789abcdefABCDEF") != "" {
		return badRequest("a chunk of size %q", tunnel.Clip(size))
	}
	if c.data = c.left > 0; c.data {
		c.text = append(strconv.AppendUint(nil, c.left, 16), "\r\n"...)
		return nil
	}
	if line, err = c.line(); err != nil {
		return err
	} else if line != "" {
		return badRequest("a trailer section behind the chunks")
	}
	c.text, c.over = []byte("0\r\n\r\n"), true
	return nil
}

// endChunk reads what follows a chunk.
func (c *chunkReader) endChunk() error {
	line, err := c.line()
	if err != nil {
		return err
	}
	if line != "" {
		return badRequest("a chunk is longer than its size")
	}
	c.text, c.data = []byte("\r\n"), false
	return nil
}

// line reads a line, which ends with CRLF.
func (c *chunkReader) line() (string, error) {
	var b strings.Builder
	for b.Len() <= maxChunkLine {
		one, err := c.from.ReadByte()
		if err != nil {
			return "", err
		}
		if one == '\n' {
			text, ok := strings.CutSuffix(b.String(), "\r")
			if !ok || strings.Contains(text, "\r") {
				return "", badRequest("a line between chunks that does not end with CRLF")
			}
			return text, nil
		}
		b.WriteByte(one)
	}
	return "", badRequest("the line of a chunk has more than %d bytes", maxChunkLine)
}
