package ssh

import (
	"slices"
	"testing"

	"golang.org/x/crypto/ssh"
)

func TestCiphersOfClients(t *testing.T) {
	for _, c := range []struct {
		begins string
		aes    bool // the processor has it
		chacha bool // is offered
	}{
		{"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u7\r\n", true, false},
		{"SSH-2.0-OpenSSH_10.0\r\n", true, false},
		{"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u7\r\n", false, true},
		{"SSH-2.0-OpenSSH_5.3\r\n", true, true}, // has no AES-GCM
		{"SSH-2.0-OpenSSH_9", true, true},       // the rest has not come
		{"SSH-2.0-OpenSSH_for_Windows_9.5\r\n", true, false},
		{"SSH-2.0-dropbear_2022.83\r\n", true, true},
		{"SSH-2.0-PuTTY_Release_0.78\r\n", true, true},
		{"", true, true},
	} {
		got := ciphersFor([]byte(c.begins), c.aes)
		if slices.Contains(got, ssh.CipherChaCha20Poly1305) != c.chacha {
			t.Errorf("%q, AES in hardware: %t: %v", c.begins, c.aes, got)
		}
	}
}
