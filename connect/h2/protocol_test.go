package h2

import (
	"bytes"
	"io"
	"net"
	"slices"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"culvert.dev/connect"
	"culvert.dev/internal/testnet"
	"culvert.dev/tunnel"
	"culvert.dev/tunnel/tunneltest"
)

// fieldList encodes a header list of names and values.
func fieldList(pairs ...string) []byte {
	var b bytes.Buffer
	enc := hpack.NewEncoder(&b)
	for i := 0; i < len(pairs); i += 2 {
		_ = enc.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]})
	}
	return b.Bytes()
}

// opening is all a client says until its first request is complete.
func opening(list []byte) []byte {
	var b bytes.Buffer
	b.WriteString(preface)
	fr := http2.NewFramer(&b, nil)
	_ = fr.WriteSettings()
	_ = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: list, EndHeaders: true})
	return b.Bytes()
}

// unwrap finds the bytes of stream 1.
func unwrap(heard []byte) (stream []byte, over bool) {
	fr := http2.NewFramer(nil, bytes.NewReader(heard))
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			return stream, over
		}
		if f.Header().StreamID != 1 {
			continue
		}
		switch f := f.(type) {
		case *http2.DataFrame:
			stream = append(stream, f.Data()...)
			over = over || f.StreamEnded()
		case *http2.HeadersFrame:
			over = over || f.StreamEnded()
		case *http2.RSTStreamFrame:
			over = true
		}
	}
}

func TestProtocol(t *testing.T) {
	wrap := func(stream []byte) []byte {
		var b bytes.Buffer
		_ = http2.NewFramer(&b, nil).WriteData(1, false, stream)
		return b.Bytes()
	}
	addr, err := connect.ParseAuthority("192.0.2.1:8443")
	if err != nil {
		t.Fatal(err)
	}
	tunneltest.TestProtocol(t, &Protocol{},
		tunneltest.Preamble{
			Title: "name", Bytes: opening(fieldList(":method", "CONNECT", ":authority", "Xyz.example:443")),
			Name: tunnel.MustParseName("xyz.example"), Port: 443, Wrap: wrap, Unwrap: unwrap,
		},
		tunneltest.Preamble{
			Title: "address", Bytes: opening(fieldList(":method", "CONNECT", ":authority", "192.0.2.1:8443", "user-agent", "test")),
			Addr: addr.Addr, Port: 8443, Wrap: wrap, Unwrap: unwrap,
		},
	)
}

// TestTwoUsersOfOneConnection is must-never N29: the tunnels of two users over
// one connection, and those of one after another, have each a connection to the
// service of their own.
func TestTwoUsersOfOneConnection(t *testing.T) {
	heard := make(chan string, 3)
	to := testnet.Service(t, func(c net.Conn) {
		b, _ := io.ReadAll(c)
		heard <- string(b)
	})
	users := connect.Passwords(map[string]string{"alice": "a-secret", "bob": "b-secret"})
	g := serve(t, tunneltest.Table{"svc:1": to}, &Protocol{Auth: &connect.BasicAuth{Verify: users}})
	r := rawClient(t, g.Addr)
	for i, user := range []string{"alice", "bob", "alice"} {
		id := uint32(2*i + 1)
		_ = r.connect(id, "svc:1", "proxy-authorization", connect.BasicCredentials(user, user[:1]+"-secret"))
		if a := r.answer(id); a.status != "200" {
			t.Fatalf("%s: got %+v", user, a)
		}
	}
	for i, text := range []string{"from alice", "from bob", "from alice again"} {
		_ = r.fr.WriteData(uint32(2*i+1), true, []byte(text))
	}
	got := []string{<-heard, <-heard, <-heard}
	slices.Sort(got)
	if want := []string{"from alice", "from alice again", "from bob"}; !slices.Equal(got, want) {
		t.Errorf("the service's connections heard %q, want %q", got, want)
	}
	testnet.Eventually(t, patience, func() bool { return len(g.Outcomes()) == 3 }, "the tunnels end")
	if n := g.Dials(); n != 3 {
		t.Errorf("%d dials for three tunnels", n)
	}
	peers := map[string]int{}
	for _, o := range g.Outcomes() {
		peers[o.Peer.ID]++
	}
	if peers["alice"] != 2 || peers["bob"] != 1 {
		t.Errorf("the tunnels are of %v, want two of alice's and one of bob's", peers)
	}
}
