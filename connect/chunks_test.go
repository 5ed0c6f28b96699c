package connect

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/iotest"

	"culvert.dev/tunnel"
)

// readChunks returns what a service gets, and the error behind it; nil for the end of the stream.
func readChunks(r io.Reader) (string, error) {
	c, p := newChunkReader(r), make([]byte, 7)
	var got []byte
	for {
		n, err := c.read(p)
		got = append(got, p[:n]...)
		if err == io.EOF {
			err = nil
			return string(got), err
		}
		if err != nil {
			return string(got), err
		}
	}
}

func TestChunks(t *testing.T) {
	for send, want := range map[string]string{
		"0\r\n\r\n":               "0\r\n\r\n",
		"5\r\nhello\r\n0\r\n\r\n": "5\r\nhello\r\n0\r\n\r\n",
		"00A;ext=\"1\"\r\n0123456789\r\n000\r\n\r\n":         "a\r\n0123456789\r\n0\r\n\r\n",
		"1 \r\na\r\n1\r\nb\r\n0;x\r\n\r\nGET http://b.test/": "1\r\na\r\n1\r\nb\r\n0\r\n\r\n",
	} {
		for _, r := range []io.Reader{strings.NewReader(send), iotest.OneByteReader(strings.NewReader(send))} {
			if got, err := readChunks(r); got != want || err != nil {
				t.Errorf("%q: got %q, %v, want %q", send, got, err, want)
			}
		}
	}
	for send, want := range map[string]string{
		"":                                       "",
		"5\r\nhel":                               "5\r\nhel",
		"5\r\nhello\r\n":                         "5\r\nhello\r\n",
		"5\r\nhello0\r\n\r\n":                    "5\r\nhello",
		"4\r\nhello\r\n0\r\n\r\n":                "4\r\nhell",
		"5\nhello\r\n0\r\n\r\n":                  "",
		"5\r\r\nhello\r\n0\r\n\r\n":              "",
		"0\r\nTrailer: 1\r\n\r\n":                "",
		"0\r\n\n":                                "",
		"+5\r\nhello\r\n0\r\n\r\n":               "",
		"-1\r\nhello\r\n0\r\n\r\n":               "",
		"0x5\r\nhello\r\n0\r\n\r\n":              "",
		"1_0\r\nhello\r\n0\r\n\r\n":              "",
		" 5\r\nhello\r\n0\r\n\r\n":               "",
		"\r\nhello":                              "",
		"ffffffffffffffff\r\nhello":              "",
		"10000000000000000\r\nhello":             "",
		"5;" + strings.Repeat("a", 300) + "\r\n": "",
	} {
		got, err := readChunks(strings.NewReader(send))
		if got != want || err == nil || tunnel.ReasonOf(err) != tunnel.BadRequest && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%q: got %q, %v, want %q and an error", send, got, err, want)
		}
	}
}

// Whatever is sent, a service reads either the whole content and nothing behind it, or content
// that is cut short.
func FuzzChunks(f *testing.F) {
	f.Add([]byte("5\r\nhello\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte("a;b\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n"))
	f.Add([]byte("5\nhello\n0\n\n"))
	f.Add([]byte("ffffffffffffffff\r\n"))
	f.Fuzz(func(t *testing.T, sent []byte) {
		got, failed := readChunks(bytes.NewReader(sent))
		if len(got) > len(sent) {
			t.Fatalf("%q has become %q", sent, got)
		}
		r := bufio.NewReader(strings.NewReader("POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + got))
		req, err := http.ReadRequest(r)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(req.Body)
		rest, _ := io.ReadAll(r)
		switch {
		case failed == nil && (err != nil || len(rest) > 0):
			t.Errorf("%q has become %q: a service reads %q, %v, and %q behind it", sent, got, body, err, rest)
		case failed != nil && err == nil:
			t.Errorf("%q, which is %v, has become the whole request %q", sent, failed, got)
		}
	})
}
