package ssh

import (
	"bytes"
	"encoding/binary"
	"runtime"
	"slices"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/cpu"

	"culvert.dev/tunnel"
)

// ciphers authenticate their data, by themselves or with one of macs.
var ciphers = append(append([]string{ssh.CipherChaCha20Poly1305}, gcmCiphers...), ctrCiphers...)

var (
	gcmCiphers = []string{ssh.CipherAES128GCM, ssh.CipherAES256GCM}
	ctrCiphers = []string{ssh.CipherAES128CTR, ssh.CipherAES192CTR, ssh.CipherAES256CTR}
)

// fastAES reports whether the processor has instructions for AES and for GCM.
var fastAES = cpu.X86.HasAES && cpu.X86.HasPCLMULQDQ || cpu.ARM64.HasAES && cpu.ARM64.HasPMULL || runtime.GOARCH == "s390x"

const (
	// openSSH begins the version of a client that sends its algorithms as soon as it has read the
	// version of the server. Others wait for the server's algorithms.
	openSSH = "SSH-2.0-OpenSSH_"

	// kexInitWait is how long the server waits for them: a scanner that calls itself OpenSSH may
	// not send any.
	kexInitWait = 500 * time.Millisecond

	// maxKexInit is the longest message with algorithms that is read here. That of OpenSSH has less
	// than 2 KiB.
	maxKexInit = 8 << 10 // bytes
)

// A kexInit is the first message of a client, RFC 4253 section 7.1.
type kexInit struct {
	Cookie                  [16]byte `sshtype:"20"`
	KexAlgos                []string
	ServerHostKeyAlgos      []string
	CiphersClientServer     []string
	CiphersServerClient     []string
	MACsClientServer        []string
	MACsServerClient        []string
	CompressionClientServer []string
	CompressionServerClient []string
	LanguagesClientServer   []string
	LanguagesServerClient   []string
	FirstKexFollows         bool
	Reserved                uint32
}

// ciphers returns the ciphers that the client is offered.
//
// The client's order decides (RFC 4253 section 7.1). OpenSSH has ChaCha20 first, which the
// library computes without vector instructions, AES in counter mode next, which needs a MAC
// beside it, and AES-GCM last. Where the processor has AES, GCM costs less than half of either
// for each byte. So the lists of OpenSSH are read before it is offered anything: one round
// trip more for the login, half a second at most.
func (s *session) ciphers() []string {
	if !fastAES || s.conn.greet() != nil {
		return ciphers
	}
	timed := false
	for {
		b := s.c.Buffered()
		switch is := bytes.HasPrefix(b, []byte(openSSH)); {
		case !is && !bytes.HasPrefix([]byte(openSSH), b):
			return ciphers
		case is && !timed:
			timed = true
			s.limitRead(time.Now().Add(kexInitWait))
			defer s.limitRead(time.Time{})
		}
		if client, whole := readKexInit(b); whole {
			return ciphersFor(client)
		}
		if s.c.Fill(maxVersion+maxKexInit) != nil {
			return ciphers // the library reads on, or gets the error again
		}
	}
}

// limitRead has reads of the connection fail from t on; the zero Time means never. Once the Server
// has ended the time of the connection, they fail whatever t is.
func (s *session) limitRead(t time.Time) {
	if ender, ok := s.h.(tunnel.PreambleEnder); ok {
		ender.LimitRead(t)
	} else {
		_ = s.c.SetReadDeadline(t)
	}
}

// readKexInit returns the message that follows the client's version in b, or nil if something else
// does. It returns false if more of b is needed.
func readKexInit(b []byte) (*kexInit, bool) {
	line, packet, ok := bytes.Cut(b, []byte("\n"))
	if !ok || len(packet) < 5 {
		return nil, len(line) >= maxVersion
	}
	length, padding := int64(binary.BigEndian.Uint32(packet)), int64(packet[4])
	packet = packet[5:]
	switch {
	case length > maxKexInit-4 || length < 1+padding:
		return nil, true
	case int64(len(packet)) < length-1:
		return nil, false
	}
	client := new(kexInit)
	if ssh.Unmarshal(packet[:length-1-padding], client) != nil {
		return nil, true
	}
	return client, true
}

// ciphersFor returns the ciphers for a client that has sent k, which is nil if it has sent none.
func ciphersFor(k *kexInit) []string {
	switch {
	case k == nil:
	case common(gcmCiphers, k.CiphersClientServer, k.CiphersServerClient):
		return gcmCiphers
	case common(ctrCiphers, k.CiphersClientServer, k.CiphersServerClient) && common(macs, k.MACsClientServer, k.MACsServerClient):
		return ctrCiphers
	}
	return ciphers
}

// common reports whether each of lists has one of ours.
func common(ours []string, lists ...[]string) bool {
	for _, l := range lists {
		if !slices.ContainsFunc(l, func(name string) bool { return slices.Contains(ours, name) }) {
			return false
		}
	}
	return true
}
