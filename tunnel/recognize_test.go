package tunnel

import (
	"context"
	"io"
	"net"
	"strings"
	"testing"
)

func TestStrangersAreCalledByTheirNames(t *testing.T) {
	for _, tt := range []struct{ sent, want string }{
		{"\x05\x01\x00", "this is SOCKS5, which listener :443 does not accept; add socks5 to its protocols"},
		{"\x05\x02\x00\x01", "this is SOCKS5"},
		{"\x05\x02\x00", "3 bytes that begin like no protocol of listener :443"},
		{"\x04\x01\x00\x50", "this is SOCKS4"},
		{"SSH-2.0-OpenSSH_9.6\r\n", "this is SSH, which listener :443 does not accept; give it a port of its own: service: NAME:22"},
		{"\x00\x00\x00\x08\x04\xd2\x16\x2f", "this is PostgreSQL"},
		{"\x00\x00\x00\x54\x00\x03\x00\x00user\x00", "this is PostgreSQL"},
		{"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n", "this is a PROXY header"},
		{"\r\n\r\n\x00\r\nQUIT\n\x21\x11", "this is a PROXY header"},
		{"\x16\x03\x01\x02\x00", "this is TLS"},
		{"EHLO mail.example.com\r\n", "this is SMTP"},
		{"*1\r\n$4\r\nPING\r\n", "this is Redis"},
		{"CONNECT a.test:443 HTTP/1.1\r\n", "this is HTTP CONNECT"},
		{"GET / HTTP/1.1\r\n", "this is HTTP, which listener :443 does not accept; it is no web server"},
		{"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "this is HTTP/2"},
		{"\x1b[31m", `5 bytes that begin like no protocol of listener :443: "\x1b[31m"`},
		{"", "0 bytes that begin"},
	} {
		for i := range len(tt.sent) {
			_ = unknownPreamble(":443", []byte(tt.sent[:i])) // of any length
		}
		if got := unknownPreamble(":443", []byte(tt.sent)); got.Reason != BadPreamble || !strings.Contains(got.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.sent, got, tt.want)
		}
	}
}

// What begins with words as HTTP does is told from HTTP.
func TestForeign(t *testing.T) {
	for sent, want := range map[string]string{
		"EHLO mail.example.com\r\n": "this is SMTP, which listener :443 does not accept; give it a port of its own: service: NAME:25",
		"SSH-2.0-OpenSSH_9.6\r\n":   "this is SSH, which listener :443 does not accept; give it a port of its own: service: NAME:22",
		"GET / HTTP/1.1\r\n":        "",
		"CONNECT a.test:443\r\n":    "",
		"PRI * HTTP/2.0\r\n":        "",
		"whatever it is\r\n":        "",
		"":                          "",
	} {
		if got := ForeignProtocol(":443", []byte(sent)); got != want {
			t.Errorf("%q: got %q, want %q", sent, got, want)
		}
	}
}

// A client of SOCKS5 hears in its own words that none of its methods will do,
// and whoever else is not known is reset.
func TestSOCKS5IsAnsweredWhereItIsNotTaken(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	failed := make(chan error, 1)
	go func() {
		c := NewConn(server)
		c.Listener = ":443"
		_, err := detect(c, nil, []Protocol{nobodys{}, nobodys{}})
		failed <- err
	}()
	if _, err := client.Write([]byte{5, 1, 0}); err != nil {
		t.Fatal(err)
	}
	var answer [2]byte
	if _, err := io.ReadFull(client, answer[:]); err != nil || answer != [2]byte{5, 0xff} {
		t.Errorf("answered %x, %v, want 05ff", answer, err)
	}
	if err := <-failed; ReasonOf(err) != BadPreamble || !strings.Contains(err.Error(), "this is SOCKS5, which listener :443 does not accept") {
		t.Errorf("refused: %v", err)
	}
}

// nobodys is a protocol of which no connection is.
type nobodys struct{}

func (nobodys) Name() string                                    { return "nobodys" }
func (nobodys) Sniff([]byte) Verdict                            { return No }
func (nobodys) ServeConn(context.Context, *Conn, Handler) error { return nil }
