package nat

import (
	"bytes"
	"context"
	"encoding/hex"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// captured returns an answer of miniupnpd 2.3.1 or coturn 4.6.1.
func captured(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "answers", name+".bin"))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func addCaptured(f *testing.F) {
	f.Helper()
	names, err := filepath.Glob("testdata/answers/*.bin")
	if err != nil || len(names) == 0 {
		f.Fatalf("no answers: %v", err)
	}
	for _, name := range names {
		f.Add(captured(f, strings.TrimSuffix(filepath.Base(name), ".bin")))
	}
}

var outside7 = netip.MustParseAddrPort("11.0.0.7:443")

func TestParsePCP(t *testing.T) {
	nonce := [12]byte([]byte("culvertnonce"))
	for _, tt := range []struct {
		name string
		want pcpReply
		err  string
	}{
		{"pcp-announce", pcpReply{opcode: pcpAnnounce, epoch: 2}, ""},
		{"pcp-map-tcp", pcpReply{opcode: pcpMap, lifetime: 2 * time.Hour, epoch: 2, nonce: nonce, protocol: 6, internal: 443, external: outside7}, ""},
		{"pcp-map-udp", pcpReply{opcode: pcpMap, lifetime: 2 * time.Hour, epoch: 2, nonce: nonce, protocol: 17, internal: 443, external: outside7}, ""},
		{"pcp-delete", pcpReply{opcode: pcpMap, result: 2, epoch: 2, nonce: nonce, protocol: 6, internal: 443, external: netip.MustParseAddrPort("11.0.0.7:0")}, ""},
		{"pcp-version-9", pcpReply{opcode: pcpAnnounce, result: 1, epoch: 2}, ""},
		{"pcp-opcode-9", pcpReply{opcode: 9, result: 4, epoch: 2}, ""},
		{"pcp-malformed", pcpReply{}, "response of MAP is 28 bytes, less than 60"},
		{"natpmp-opcode-9", pcpReply{}, "does not speak this version of PCP"},
		{"stun-coturn", pcpReply{}, "opcode 0x1 of PCP is none of a response"},
	} {
		got, err := parsePCP(captured(t, tt.name))
		if tt.err == "" && (err != nil || got != tt.want) || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: got %+v, %v; want %+v, %q", tt.name, got, err, tt.want, tt.err)
		}
	}
}

func TestParseNATPMP(t *testing.T) {
	for _, tt := range []struct {
		name string
		want natpmpReply
		err  string
	}{
		{"natpmp-address", natpmpReply{opcode: natpmpAddress, epoch: 2, outside: outside7.Addr()}, ""},
		{"natpmp-map-tcp", natpmpReply{opcode: natpmpMapTCP, epoch: 2, internal: 8443, external: 8443, lifetime: time.Hour}, ""},
		{"natpmp-delete", natpmpReply{opcode: natpmpMapTCP, epoch: 2, internal: 8443}, ""},
		{"natpmp-opcode-9", natpmpReply{opcode: 9, result: 5, epoch: 2}, ""},
		{"pcp-announce", natpmpReply{}, "none of a response"},
	} {
		got, err := parseNATPMP(captured(t, tt.name))
		if tt.err == "" && (err != nil || got != tt.want) || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("%s: got %+v, %v; want %+v, %q", tt.name, got, err, tt.want, tt.err)
		}
	}
}

// Test vectors of RFC 5769, sections 2.2 and 2.3, without the attributes of a password.
func TestParseSTUN(t *testing.T) {
	m, err := parseSTUN(captured(t, "stun-coturn"))
	if err != nil || m.kind != stunSuccess || m.mapped.Addr().String() != "11.0.0.7" || m.mapped.Port() != 33007 || string(m.id[:]) != "culvertnonce" {
		t.Errorf("coturn: got %+v, %v", m, err)
	}
	for _, tt := range []struct{ name, hex, want string }{
		{"IPv4", "0101003c2112a442b7e7a701bc34d686fa87dfae8022000b7465737420766563746f7220002000080001a147e112a643000800142b91f599fd9e90c38c7489f92af9ba53f06be7d780280004c07d4c96", "192.0.2.1:32853"},
		{"IPv6", "010100482112a442b7e7a701bc34d686fa87dfae8022000b7465737420766563746f7220002000140002a1470113a9faa5d3f179bc25f4b5bed2b9d900080014a382954e4be67bf11784c97c8292c275bfe3ed4180280004c8fb0b4c", "[2001:db8:1234:5678:11:2233:4455:6677]:32853"},
	} {
		b, err := hex.DecodeString(tt.hex)
		if err != nil {
			t.Fatal(err)
		}
		m, err := parseSTUN(b)
		if err != nil || m.mapped.String() != tt.want || !m.fingerprint {
			t.Errorf("%s: got %+v, %v; want %s", tt.name, m, err, tt.want)
		}
		for n := range b {
			if _, err := parseSTUN(b[:n]); err == nil {
				t.Errorf("%s: the first %d of %d bytes are a message", tt.name, n, len(b))
			}
		}
		for i := range b { // each byte is in the fingerprint
			bad := bytes.Clone(b)
			bad[i] ^= 0x10
			if m, err := parseSTUN(bad); err == nil && m.fingerprint {
				t.Errorf("%s: byte %d may change under the fingerprint", tt.name, i)
			}
		}
	}
}

func FuzzParsePCP(f *testing.F) {
	addCaptured(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := parsePCP(b); err == nil && len(b) < pcpHeaderSize {
			t.Errorf("%d bytes are %+v", len(b), r)
		}
		isAnnouncement(b)
	})
}

func FuzzParseNATPMP(f *testing.F) {
	addCaptured(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := parseNATPMP(b); err == nil && r.result == 0 && r.opcode == natpmpAddress && !r.outside.IsValid() {
			t.Errorf("%x is an address response without an address", b)
		}
	})
}

func FuzzSTUN(f *testing.F) {
	addCaptured(f)
	f.Add(appendFingerprint(appendSTUN(nil, stunRequest, 8, make([]byte, 12))))
	f.Add(append(appendSTUN(nil, stunRequest, 4, make([]byte, 12)), 0, 6, 0, 0))
	from := netip.MustParseAddrPort("[2001:db8::1]:443")
	f.Fuzz(func(t *testing.T, b []byte) {
		answer, stun := new(Responder).Answer(b, from)
		if stun != IsSTUN(b) || answer != nil && !stun {
			t.Errorf("%x: STUN %v, answer %x", b, stun, answer)
		}
		if answer == nil {
			return
		}
		if len(answer) > len(b)+24 {
			t.Errorf("an answer of %d bytes to a question of %d", len(answer), len(b))
		}
		m, err := parseSTUN(answer)
		if err != nil || m.kind == stunSuccess && m.mapped != from {
			t.Errorf("the answer %x is %+v, %v", answer, m, err)
		}
	})
}

// The answers to requests that are none, and to too many of them.
func TestResponder(t *testing.T) {
	question := appendSTUN(nil, stunRequest, 0, []byte("culvertnonce"))
	from := netip.MustParseAddrPort("192.0.2.1:5000")
	for _, tt := range []struct {
		name string
		b    []byte
		stun bool
		want uint16 // kind of the answer; 0 for none
	}{
		{"request", question, true, stunSuccess},
		{"response", appendSTUN(nil, stunSuccess, 0, []byte("culvertnonce")), true, 0},
		{"indication", appendSTUN(nil, 0x0011, 0, []byte("culvertnonce")), true, 0},
		{"unknown attribute", append(appendSTUN(nil, stunRequest, 4, []byte("culvertnonce")), 0x00, 0x06, 0, 0), true, stunFailure},
		{"another cookie", append([]byte{0, 1, 0, 0, 1, 2, 3, 4}, question[8:]...), false, 0},
		{"longer than it says", append(bytes.Clone(question), 0, 0, 0, 0), false, 0},
		{"wrong fingerprint", append(appendSTUN(nil, stunRequest, 8, []byte("culvertnonce")), 0x80, 0x28, 0, 4, 1, 2, 3, 4), true, 0},
		{"nothing", nil, false, 0},
	} {
		answer, stun := new(Responder).Answer(tt.b, from)
		kind := uint16(0)
		if m, err := parseSTUN(answer); err == nil {
			kind = m.kind
		}
		if stun != tt.stun || kind != tt.want {
			t.Errorf("%s: got STUN %v and answer %x, want %v and kind %#04x", tt.name, stun, answer, tt.stun, tt.want)
		}
	}
}

// A client gets few answers, whatever address of its network it writes; and so do all together.
func TestResponderLimits(t *testing.T) {
	question := appendSTUN(nil, stunRequest, 0, []byte("culvertnonce"))
	bubble(t, func(t *testing.T) {
		r := new(Responder)
		ask := func(from string) int {
			n := 0
			for range 3 * stunPerClient {
				if answer, _ := r.Answer(question, netip.MustParseAddrPort(from)); answer != nil {
					n++
				}
			}
			return n
		}
		if n := ask("192.0.2.1:1"); n != stunPerClient {
			t.Errorf("%d answers, want %d", n, stunPerClient)
		}
		if n := ask("[2001:db8::1]:1") + ask("[2001:db8::2]:1"); n != stunPerClient {
			t.Errorf("a network of IPv6 got %d answers, want %d", n, stunPerClient)
		}
		if n := ask("192.0.2.2:1"); n != stunPerClient {
			t.Errorf("another client got %d answers, want %d", n, stunPerClient)
		}
		all := 0
		for i := range 20000 {
			a := netip.AddrFrom4([4]byte{10, 9, byte(i >> 8), byte(i)})
			if answer, _ := r.Answer(question, netip.AddrPortFrom(a, 1)); answer != nil {
				all++
			}
		}
		if all > stunPerSecond || len(r.clients) > maxSTUNClients {
			t.Errorf("%d answers to %d clients in a second, want %d and %d at most", all, len(r.clients), stunPerSecond, maxSTUNClients)
		}
		time.Sleep(time.Second)
		if n := ask("192.0.2.1:1"); n != stunPerClient {
			t.Errorf("a second later %d answers, want %d", n, stunPerClient)
		}
	})
}

// A question to a real socket: lost ones are asked again, and answers of somebody else do not
// count.
func TestAskSTUN(t *testing.T) {
	server, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	other, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 2048)
		for asked := 0; ; asked++ {
			n, from, err := server.ReadFrom(b)
			if err != nil {
				return
			}
			if asked == 0 {
				continue
			}
			at := from.(*net.UDPAddr).AddrPort()
			forged, _ := new(Responder).Answer(b[:n], netip.MustParseAddrPort("192.0.2.66:66"))
			_, _ = other.WriteTo(forged, from)
			id := bytes.Clone(forged)
			id[12] ^= 1
			_, _ = server.WriteTo(id, from)
			right, _ := new(Responder).Answer(b[:n], at)
			_, _ = server.WriteTo(right, from)
		}
	}()
	defer func() {
		_, _ = server.Close(), other.Close()
		<-done
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	got, err := AskSTUN(ctx, nil, server.LocalAddr().(*net.UDPAddr).AddrPort())
	if err != nil || got.Addr().String() != "127.0.0.1" {
		t.Errorf("AskSTUN returned %s, %v; want the address of loopback", got, err)
	}
}

// RFC 8489 section 6.2.1: requests at 0, 500, 1500, 3500 ms and so on, each wait within a tenth.
func TestSchedules(t *testing.T) {
	for _, tt := range []struct {
		name string
		schedule
		waits    []time.Duration
		attempts int
	}{
		{"STUN", stunSchedule, []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 16 * time.Second, 16 * time.Second}, 7},
		{"NAT-PMP", natpmpSchedule, []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second}, 9},
		{"PCP", pcpSchedule, []time.Duration{3 * time.Second, 6 * time.Second, 12 * time.Second, 24 * time.Second}, 1000},
	} {
		for i, want := range tt.waits {
			if got, send := tt.schedule(i); !send || got < want*9/10 || got > want*11/10 {
				t.Errorf("%s: wait %d is %s, %v; want %s", tt.name, i, got, send, want)
			}
		}
		if _, send := tt.schedule(tt.attempts - 1); !send {
			t.Errorf("%s: gives up before attempt %d", tt.name, tt.attempts)
		}
	}
	if wait, _ := pcpSchedule(40); wait > 1024*time.Second*11/10 {
		t.Errorf("PCP waits %s, want 1024 s at most", wait)
	}
	if _, send := stunSchedule(7); send {
		t.Error("STUN sends more than seven requests")
	}
}

// RFC 6887 section 8.5.
func TestEpoch(t *testing.T) {
	start := time.Unix(1e9, 0)
	for _, tt := range []struct {
		name   string
		server uint32        // said first
		passed time.Duration // of ours
		then   uint32
		lost   bool
	}{
		{"the same", 1000, 100 * time.Second, 1100, false},
		{"a second back, as datagrams overtake each other", 1000, 0, 999, false},
		{"two seconds back", 1000, 0, 998, true},
		{"restarted", 1000, 100 * time.Second, 5, true},
		{"a clock that is slow by a sixteenth", 1000, 1600 * time.Second, 2500, false},
		{"a clock that stands", 1000, 1600 * time.Second, 1000, true},
		{"a clock that is fast by a sixteenth", 1000, 1500 * time.Second, 2600, false},
		{"a clock that jumps", 1000, 10 * time.Second, 5000, true},
		{"from 0 to the largest", 0, time.Second, 1<<32 - 1, true},
		{"from the largest to 0", 1<<32 - 1, time.Second, 0, true},
	} {
		var e epoch
		if e.lost(tt.server, start) {
			t.Errorf("%s: the first answer says that something was lost", tt.name)
		}
		if got := e.lost(tt.then, start.Add(tt.passed)); got != tt.lost {
			t.Errorf("%s: lost is %v, want %v", tt.name, got, tt.lost)
		}
	}
}

func TestAssess(t *testing.T) {
	for _, tt := range []struct {
		local, router, seen string
		want                Kind
	}{
		{"192.168.1.2", "203.0.113.7", "", SingleNAT},
		{"192.168.1.2", "203.0.113.7", "203.0.113.7", SingleNAT},
		{"192.168.1.2", "203.0.113.7", "203.0.113.8", DoubleNAT},
		{"192.168.1.2", "10.1.1.1", "203.0.113.8", DoubleNAT},
		{"192.168.1.2", "100.64.0.1", "203.0.113.8", CGNAT},
		{"192.168.1.2", "100.127.255.255", "", CGNAT},
		{"192.168.1.2", "100.128.0.1", "", SingleNAT},
		{"192.0.0.2", "", "203.0.113.8", CGNAT},
		{"192.168.1.2", "", "203.0.113.7", SingleNAT},
		{"192.168.1.2", "", "", Unknown},
		{"203.0.113.7", "", "203.0.113.7", NoNAT},
		{"203.0.113.7", "", "", NoNAT},
		{"192.168.1.2", "0.0.0.0", "", DoubleNAT},
		{"192.168.1.2", "127.0.0.1", "", DoubleNAT},
	} {
		parse := func(s string) netip.Addr {
			if s == "" {
				return netip.Addr{}
			}
			return netip.MustParseAddr(s)
		}
		if got, why := Assess(parse(tt.local), parse(tt.router), parse(tt.seen)); got != tt.want || why == "" {
			t.Errorf("Assess(%q, %q, %q) is %s (%s), want %s", tt.local, tt.router, tt.seen, got, why, tt.want)
		}
	}
}
