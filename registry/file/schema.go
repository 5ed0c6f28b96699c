package file

import _ "embed"

// Schema is the JSON Schema of the configuration file, for editors. It knows
// the same keys as the loader; what it can't say (two services of one name,
// an endpoint that leads back) only the loader finds.
//
//go:embed schema.json
var Schema string
