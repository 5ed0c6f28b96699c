package ssh

import (
	"bytes"
	"runtime"
	"strconv"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/cpu"
)

// ciphers authenticate what they carry, by themselves or with one of macs.
var ciphers = append([]string{ssh.CipherChaCha20Poly1305}, aesCiphers...)

var aesCiphers = []string{ssh.CipherAES128GCM, ssh.CipherAES256GCM, ssh.CipherAES256CTR, ssh.CipherAES192CTR, ssh.CipherAES128CTR}

// fastAES is whether the processor has instructions for AES and for GCM.
var fastAES = cpu.X86.HasAES && cpu.X86.HasPCLMULQDQ || cpu.ARM64.HasAES && cpu.ARM64.HasPMULL || runtime.GOARCH == "s390x"

// ciphersFor returns the ciphers for a client whose first bytes are b, as far as they have
// come.
//
// The client's order decides (RFC 4253 section 7.1). OpenSSH has ChaCha20 first, which the
// library computes without vector instructions, and AES in counter mode next: where the
// processor has AES, that costs two thirds of it for each byte. All OpenSSH since 7 has it with
// a MAC of ours. Other clients may have nothing but ChaCha20 in common with this side, as
// dropbear does.
func ciphersFor(b []byte, fastAES bool) []string {
	if version, ok := bytes.CutPrefix(b, []byte("SSH-2.0-OpenSSH_")); ok && fastAES {
		version = bytes.TrimPrefix(version, []byte("for_Windows_"))
		major, _, found := bytes.Cut(version, []byte("."))
		if n, err := strconv.ParseUint(string(major), 10, 16); found && err == nil && n >= 7 {
			return aesCiphers
		}
	}
	return ciphers
}
