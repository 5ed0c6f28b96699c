// Package file reads a gateway's configuration file, and the services in it
// are a registry.Source that follows the file as it changes.
//
//	cluster: west
//	networks:
//	  - name: office
//	    cidrs: [192.0.2.0/24]
//	listeners:
//	  - address: :443
//	admin: 127.0.0.1:9090
//	services:
//	  - name: orders.example.com
//	    ports: [443]
//	    exposedTo: [office]
//	    endpoints: ["10.0.1.7:8443", "orders.internal:8443"]
//
// Load reads a file once, for start-up and for "config check":
//
//	cfg, err := file.Load("culvert.yaml")
//	if err != nil {
//		return err // Errors: every mistake, with file:line:column and how to mend it
//	}
//	src := &file.Source{Path: "culvert.yaml", Log: log}
//	err = reg.Run(ctx, src)
//
// The loader refuses what it does not understand: an unknown key is an error, and so
// is a name that two services claim. A file that is refused while the gateway runs
// changes nothing.
//
// A service in the file is exposed unless it says otherwise: writing it into the
// gateway's own file is the permission.
//
// ParseRoutes reads the short form, a "NAME[:PORT] HOST:PORT" on each line.
//
// Writers should replace the file by a rename. A file that is written in place is read
// when it has not changed for 100 ms.
package file
