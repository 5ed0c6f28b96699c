package sni_test

import (
	"errors"
	"fmt"
	"os"

	"culvert.dev/sni"
)

func ExampleParse() {
	raw, err := os.ReadFile("testdata/hellos/openssl-3.0.19-mixedcase.bin")
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = sni.Parse(raw[:100])
	fmt.Println(errors.Is(err, sni.ErrMore))
	hello, err := sni.Parse(raw)
	fmt.Println(hello.Name, err)
	_, err = sni.Parse([]byte{22, 3, 1, 0x40, 0, 1, 1, 0x11, 0x70})
	fmt.Println(err)
	// Output:
	// true
	// svc.example.test <nil>
	// sni: hello is 70000 bytes, limit 69632, at offset 6
}
