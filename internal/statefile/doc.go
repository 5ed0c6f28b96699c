// Package statefile keeps what a process has to find again after a restart in files that are whole
// at any moment, each written by one process.
//
//	lock, err := statefile.Lock("/var/lib/culvert/ports.json", "assigned ports")
//	if err != nil {
//		return err // another process has it
//	}
//	defer lock.Close()
//	err = statefile.Replace("/var/lib/culvert/ports.json", func(w io.Writer) error {
//		return json.NewEncoder(w).Encode(ports)
//	})
//
// It does not read files, and has no format.
package statefile
